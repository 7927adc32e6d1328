"""Modules: equal to the functions they stand for, and at home wherever torch takes a module."""

import copy
import io
import pickle
from contextlib import contextmanager

import pytest
import torch
from operands import same_bits
from safetensors.torch import load_file, save_file
from torch import nn

import blockscale as bs

N, K = 40, 80


def _model():
    return nn.Sequential(nn.Linear(K, N), nn.GELU(), nn.Linear(N, 24, bias=False), nn.LayerNorm(24), nn.Linear(24, 8))


def _run(model, seed=1):
    x = torch.randn(6, K, generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        return model(x)


def _calibrate(model):
    _run(model, seed=2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_layer_is_gemm(dtype):
    linear = nn.Linear(K, N, dtype=dtype)
    layer = bs.nn.Linear.from_linear(linear, method="mse")
    w, x = bs.quantize(linear.weight, method="mse"), torch.randn(2, 3, K, dtype=dtype)
    assert layer.bias is linear.bias
    with torch.no_grad():
        expected = bs.gemm(x, w, bias=linear.bias, out_dtype=dtype)
        assert same_bits(layer(x), expected)
        assert same_bits(layer(x[0, 0]), bs.gemm(x[0, :1], w, bias=linear.bias, out_dtype=dtype)[0])
        dynamic = bs.nn.Linear.from_linear(linear, method="mse", activations="dynamic")
        assert same_bits(dynamic(x), bs.gemm(bs.quantize(x), w, bias=linear.bias, out_dtype=dtype))
        static = bs.nn.Linear.from_weight(w, linear.bias, activations="static", input_scale=0.01)
        q = bs.quantize(x, global_scale=0.01)
        assert same_bits(static(x), bs.gemm(q, w, bias=linear.bias, out_dtype=dtype))
    assert layer(x[:0]).shape == (0, 3, N)


def test_autocast_is_followed():
    layer = bs.nn.Linear.from_linear(nn.Linear(K, N))
    x = torch.randn(3, K)
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(layer(x), bs.gemm(x.bfloat16(), layer.weight, bias=layer.bias))


@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
def test_a_state_dict_goes_round(activations, tmp_path):
    calibrate = _calibrate if activations == "static" else None
    source = _model()
    bs.nn.quantize_model(source, activations=activations, calibrate=calibrate)
    with torch.device("meta"):
        target = _model()
    report = bs.nn.quantize_model(target, activations=activations)
    assert [layer.snr_db for layer in report.layers] == [None] * 3
    assert all(t.is_meta for t in target.state_dict().values())
    expected = _run(source)
    file = io.BytesIO()
    torch.save(source.state_dict(), file)
    file.seek(0)
    target.load_state_dict(torch.load(file), assign=True)
    assert same_bits(_run(target), expected)
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    other = _model()
    bs.nn.quantize_model(other, activations=activations, calibrate=calibrate)
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert same_bits(_run(other), expected)


def test_casts_leave_the_weight_alone_and_moves_take_all_of_it():
    model = _model()
    bs.nn.quantize_model(model, calibrate=_calibrate)
    before = {name: t.clone() for name, t in model[0].named_buffers()}
    model.to(torch.bfloat16)
    assert model[0].bias.dtype == torch.bfloat16
    assert all(same_bits(t, before[name]) for name, t in model[0].named_buffers())
    model.half().float().double()
    assert all(same_bits(t, before[name]) for name, t in model[0].named_buffers())
    model.float()
    with torch.device("meta"):  # the default device of whatever comes next is no place to land on
        expected = model(torch.ones(2, K, device="cpu"))
    assert expected.device.type == "cpu"
    moved = copy.deepcopy(model).to("meta")
    assert {t.device.type for t in moved.state_dict().values()} == {"meta"}
    assert moved.to_empty(device="cpu")[0].scales_128x4.dtype == torch.uint8


def test_copies_and_pickles_are_equal_and_apart():
    model = _model()
    bs.nn.quantize_model(model, activations="dynamic")
    expected = _run(model)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert same_bits(_run(other), expected)
        other[0].codes.zero_()
        assert same_bits(_run(model), expected)


def test_another_load_writes_into_the_same_memory():
    """A then B then A again: each as a fresh load, at stable addresses, also for those who compiled the model."""
    models = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        models.append(_model())
        bs.nn.quantize_model(models[-1])
    served = copy.deepcopy(models[0])
    compiled = torch.compile(served, fullgraph=True, backend="aot_eager")
    addresses = {name: t.data_ptr() for name, t in served.state_dict().items()}
    for model in (models[0], models[1], models[0]):
        served.load_state_dict(model.state_dict())
        assert {name: t.data_ptr() for name, t in served.state_dict().items()} == addresses
        assert same_bits(_run(compiled), _run(model))


def test_what_is_quantised_and_what_is_reported():
    class Tied(nn.Linear):
        pass

    model = nn.ModuleDict(
        {"lm_head": nn.Linear(K, 32), "a": nn.Linear(K, 32), "b": nn.Sequential(nn.Linear(K, 33)), "c": Tied(K, 3)}
    )
    model["again"] = model["a"]
    report = bs.nn.quantize_model(model, include=["a", "b", "c", "lm_head"], exclude=["b.*", "lm_head"])
    outcome = {layer.name: layer.reason for layer in report.layers}
    assert outcome == {
        "lm_head": "excluded",
        "a": None,
        "b.0": "excluded",
        "c": "Tied is a subclass of Linear that may do more",
    }
    assert model["again"] is model["a"]
    (a,) = (layer for layer in report.layers if layer.name == "a")
    assert a.bytes_before == 4 * K * 32
    assert a.bytes_after == model["a"].weight.nbytes
    assert 15 < a.snr_db < 25
    assert "left as it is: excluded" in str(report)
    assert "4 layers" in str(report)


def test_calibration_meets_the_largest_magnitude():
    model = nn.Sequential(nn.Linear(K, N))
    inputs = torch.randn(7, K)
    bs.nn.quantize_model(model, calibrate=lambda m: [m(row[None]) for row in inputs])
    assert model[0].activations == "static"
    assert float(model[0].input_scale) == pytest.approx(float(inputs.abs().max()) / 2688)
    together = _run(model)
    alone = model(torch.randn(6, K, generator=torch.Generator().manual_seed(1))[:1])
    torch.testing.assert_close(together[:1], alone)


def test_refusals_name_what_is_wrong():
    model = _model()
    with pytest.raises(ValueError, match="activations: 'int8'"):
        bs.nn.quantize_model(model, activations="int8")
    with pytest.raises(ValueError, match="method: 'best'"):
        bs.nn.quantize_model(model, method="best")
    with pytest.raises(ValueError, match="calibrate: None"):
        bs.nn.quantize_model(model, activations="static")
    with pytest.raises(ValueError, match="calibrate: it never ran 0, 2, 4"):
        bs.nn.quantize_model(model, calibrate=lambda m: None)
    with pytest.raises(TypeError, match="model: Linear"):
        bs.nn.quantize_model(model[0])
    with torch.no_grad():
        model[2].weight[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"2: x: nan at \(3, 4\)"):
        bs.nn.quantize_model(model)
    layer = bs.nn.Linear.from_linear(nn.Linear(K, N))
    with pytest.raises(TypeError, match=r"x: torch.int64 tensor"):
        layer(torch.ones(3, K, dtype=torch.int64))
    with pytest.raises(ValueError, match="a: K = 81"):
        layer(torch.ones(3, 81))
    with pytest.raises(ValueError, match="input_scale"):
        bs.nn.Linear.from_linear(nn.Linear(K, N), activations="static")


def test_low_rank_adapters_train_on_frozen_weights():
    """A toy loss falls, and the first step's gradients are those through the dequantised weights."""

    class Adapted(nn.Module):
        def __init__(self, layer):
            super().__init__()
            self.layer, self.down, self.up = layer, nn.Linear(K, 4, bias=False), nn.Linear(4, N, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x):
            return self.layer(x) + self.up(self.down(x))

    layer = bs.nn.Linear.from_linear(nn.Linear(K, N))
    layer.bias.requires_grad_(False)
    model = nn.Sequential(Adapted(layer), nn.GELU(), bs.nn.Linear.from_linear(nn.Linear(N, 8), activations="dynamic"))
    plain = copy.deepcopy(model)
    plain[0].layer = nn.Linear(K, N)
    plain[0].layer.weight.data, plain[0].layer.bias.data = layer.weight.dequantize(), layer.bias.data
    x, wanted = torch.randn(64, K), torch.randn(64, 8)

    def loss(m):
        return (m(x) - wanted).square().mean()

    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == 3
    first = torch.autograd.grad(loss(model), [model[0].down.weight, model[0].up.weight, model[2].bias])
    expected = torch.autograd.grad(loss(plain), [plain[0].down.weight, plain[0].up.weight, plain[2].bias])
    for mine, theirs in zip(first, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)
    optimizer, before = torch.optim.Adam(trained, lr=0.02), loss(model).item()
    for _ in range(60):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()
    assert loss(model).item() < 0.6 * before


def test_groups_are_a_loop_of_layers():
    linears = [nn.Linear(K, N) for _ in range(3)]
    weights, bias = torch.stack([x.weight for x in linears]), torch.stack([x.bias for x in linears])
    for activations in (None, "dynamic"):
        layer = bs.nn.GroupedLinear.from_weights(
            weights * torch.tensor([1.0, 50.0, 0.02])[:, None, None], bias.detach(), activations=activations
        )
        sizes = torch.tensor([2, 0, 4])
        x = torch.randn(6, K)
        q = x if activations is None else bs.quantize(x, layout="linear")
        each = list(layer.each())
        expected = [
            bs.gemm(q[s:e], each[i], bias=layer.bias[i].detach(), out_dtype=torch.float32)
            for i, s, e in ((0, 0, 2), (2, 2, 6))
        ]
        with torch.no_grad():
            torch.testing.assert_close(layer(x, sizes), torch.cat(expected), rtol=1e-6, atol=1e-6)
            masked = torch.full((3, 5, K), float("nan"))
            masked[0, :2], masked[2, :4] = x[:2], x[2:]
            y = layer(masked, masked_m=torch.tensor([2, 0, 4]))
            torch.testing.assert_close(torch.cat([y[0, :2], y[2, :4]]), torch.cat(expected), rtol=1e-6, atol=1e-6)
        again = pickle.loads(pickle.dumps(layer))
        with torch.no_grad():
            assert same_bits(again(x, sizes), layer(x, sizes))


def test_modules_compile_in_one_piece():
    model = _model()
    bs.nn.quantize_model(model, activations="dynamic")
    x = torch.randn(9, K)
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch.no_grad():
        for rows in (9, 4):
            assert same_bits(compiled(x[:rows]), model(x[:rows]))
    x.requires_grad_()
    found = [torch.autograd.grad(m(x).square().sum(), x)[0] for m in (model, compiled)]
    torch.testing.assert_close(*found)
    with torch.no_grad():
        program = torch.export.export(model, (x.detach(),), dynamic_shapes=({0: torch.export.Dim("rows", min=2)},))
        assert same_bits(program.module()(x[:5]), model(x[:5]))


@pytest.mark.parametrize("activations", [None, "dynamic", "static"])
@pytest.mark.parametrize("to", ["modelopt", "compressed-tensors", "blockscale"])
def test_a_checkpoint_keeps_what_activations_are(activations, to, tmp_path):
    model = nn.Sequential(nn.Linear(K, 48), nn.GELU(), nn.Linear(48, 16))
    calibrate = _calibrate if activations == "static" else None
    bs.nn.quantize_model(model, activations=activations, calibrate=calibrate)
    bs.save_checkpoint(bs.nn.named_weights(model), tmp_path / "saved", to=to)
    fresh = nn.Sequential(nn.Linear(K, 48), nn.GELU(), nn.Linear(48, 16))
    bs.nn.load_into(fresh, tmp_path / "saved")
    assert fresh[0].activations == fresh[2].activations == activations
    if to == "modelopt":
        assert same_bits(_run(fresh), _run(model))
    bs.nn.load_into(fresh, tmp_path / "saved")  # into what is quantised already
    torch.testing.assert_close(_run(fresh), _run(model))
    other = nn.Sequential(nn.Linear(K, 48), nn.GELU(), nn.Linear(48, 16))
    bs.nn.quantize_model(other, activations=None if activations else "dynamic")
    with pytest.raises(ValueError, match=r"0.weight: activations .* in the checkpoint, but .* in the model's layer"):
        bs.nn.load_into(other, tmp_path / "saved")


def test_experts_go_round_and_what_does_not_fit_changes_nothing(tmp_path):
    def build(seed, hidden=48):
        torch.manual_seed(seed)
        up, down = (bs.nn.GroupedLinear.from_weights(torch.randn(3, *s)) for s in ((2 * hidden, 32), (32, hidden)))
        return nn.ModuleDict({"experts": bs.nn.Experts(up, down, nn.functional.silu), "out": nn.Linear(32, 4)})

    bs.save_checkpoint(bs.nn.named_weights(build(1)), tmp_path / "saved")
    target = build(2)
    bs.nn.load_into(target, tmp_path / "saved")
    for name, value in build(1).state_dict().items():
        assert same_bits(target.state_dict()[name], value)
    for other, message in (
        (build(3, hidden=64), r"experts.down.0.weight: shape \(32, 48\), but the model has \(32, 64\)"),
        (nn.ModuleDict({"out": nn.Linear(32, 4)}), "has more than the model's linear layers"),
        (nn.ModuleDict({**build(3), "more": nn.Linear(2, 2)}), "lacks more.weight, more.bias"),
    ):
        before = {name: t.clone() for name, t in other.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            bs.nn.load_into(other, tmp_path / "saved")
        assert all(same_bits(t, before[name]) for name, t in other.state_dict().items())


def test_layers_that_may_do_more_are_left_with_a_reason():
    model = nn.ModuleDict({name: nn.Linear(K, 16) for name in ("hooked", "patched", "wide", "empty", "tied")})
    model["hooked"].register_forward_hook(lambda *_: None)
    model["patched"].forward = lambda x: x
    model["wide"].double()
    model["normed"] = torch.nn.utils.parametrizations.weight_norm(nn.Linear(K, 16))
    model["lazy"] = nn.LazyLinear(16)
    model["encoder"] = nn.TransformerEncoderLayer(32, 2, 48, batch_first=True).eval()
    model["lm_head"] = model["tied"]
    report = bs.nn.quantize_model(model)
    reasons = {layer.name: layer.reason for layer in report.layers}
    assert reasons.pop("empty") is None
    assert set(reasons) >= {"hooked", "patched", "wide", "normed", "lazy", "tied", "encoder.linear1"}
    assert None not in reasons.values()
    x = torch.randn(1, 3, 32)
    with torch.no_grad():
        assert model["encoder"](x).shape == x.shape


@pytest.mark.parametrize(
    ("act", "error", "message"),
    [
        (lambda m: bs.nn.quantize_model(m, exclude="lm_head"), TypeError, "exclude: a string, 'lm_head'"),
        (
            lambda m: bs.nn.quantize_model(m, include=["nothing.*"]),
            ValueError,
            r"include: 'nothing.\*' matches no layer",
        ),
        (lambda m: bs.nn.quantize_model(m, backend="sm10"), ValueError, "backend: 'sm10'"),
        (lambda m: bs.nn.Linear.from_linear(nn.Conv1d(1, 1, 1)), TypeError, "linear: Conv1d"),
        (
            lambda m: bs.nn.Linear.from_linear(m[0], activations="static", input_scale=-1.0),
            ValueError,
            r"input_scale: -1.0",
        ),
        (
            lambda m: bs.nn.Linear.from_weight(bs.quantize(m[0].weight), torch.ones(N, dtype=torch.int32)),
            ValueError,
            "bias: torch.int32",
        ),
        (
            lambda m: bs.nn.GroupedLinear.from_weights([torch.ones(4, 32), torch.ones(4, 48)]),
            ValueError,
            r"weights: shapes \[\(4, 32\), \(4, 48\)\]",
        ),
        (lambda m: bs.nn.GroupedLinear(2, 32, 32, activations="static"), ValueError, "activations: 'static'"),
    ],
)
def test_more_refusals(act, error, message):
    with pytest.raises(error, match=message):
        act(_model())


def test_calibration_follows_keyword_calls_and_progress_is_told():
    model, steps = nn.Sequential(nn.Linear(K, N)), []

    @contextmanager
    def progress(total):
        steps.append(total)
        yield lambda: steps.append("step")

    bs.nn.quantize_model(model, calibrate=lambda m: m[0](input=torch.ones(2, K)), progress=progress)
    assert float(model[0].input_scale) == pytest.approx(1 / 2688)
    assert steps == [1, "step"]
