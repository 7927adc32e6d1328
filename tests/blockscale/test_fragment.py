"""The layout "fragment": its bytes by their definition, the way back, and tensors that carry it."""

import copy
import pickle

import pytest
import torch
from operands import every_code_and_scale, same_bits, same_tensor
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import blockscale as bs
from blockscale import reference
from blockscale.formats import fragment

SHAPES = [(16, 128), (1, 1), (5, 40), (33, 200), (48, 640), (130, 1000)]


def _word(data, at):
    return int.from_bytes(bytes(data[at : at + 4].tolist()), "little")


def _code(unit, row, k):
    """The code at (row, k) of a unit, by the documentation's words alone."""
    half, step, within = k // 64, k % 64 // 16, k % 16
    lane = 4 * (row % 8) + within % 8 // 2
    word = _word(unit, 4 * (half * 128 + lane * 4 + step))
    pair = row // 8 + 2 * (within // 8)
    bits = word >> 16 * (k % 2) & 0xFFFF
    sign, high, low, mantissa = fragment.FIELDS[pair]
    return sum((bits >> place & 1) << bit for place, bit in ((sign, 3), (high, 2), (low, 1), (mantissa, 0)))


def _scale(unit, row, block):
    """The value of the scale of (row, block) of a unit."""
    word = _word(unit, fragment.CODE_BYTES + 4 * (row % 8 * 4 + block // 2))
    word = word if block % 2 == 0 else (word << 8 | word >> 24) & 0xFFFFFFFF
    recoded = word >> 16 * (row // 8) + 4 & 0xFF
    return 0.0 if recoded == 0 else (1 + recoded % 8 / 8) * 2.0 ** (recoded // 8 - 22)


@pytest.mark.parametrize(("n", "k"), [(16, 128), (20, 300)])
def test_every_code_and_scale_is_where_the_definition_says(n, k):
    t = every_code_and_scale(n, k, layout="linear")
    units = fragment.pack(t.codes, t.scales.view(torch.uint8))
    for row in range(n):
        for column in range(k):
            unit = units[row // 16, column // 128]
            byte = int(t.codes[row, column // 2])
            assert _code(unit, row % 16, column % 128) == (byte >> 4 * (column % 2) & 15)
        for block in range(-(-k // 16)):
            assert _scale(units[row // 16, block // 8], row % 16, block % 8) == float(t.scales[row, block])


def test_every_scale_comes_back():
    scales = torch.arange(128, dtype=torch.uint8)
    assert torch.equal(fragment._restore(fragment._recode(scales)), scales)
    values = scales[:127].view(torch.float8_e4m3fn).float()
    recoded = fragment._recode(scales[:127])
    again = (1 + (recoded & 7) / 8) * torch.exp2((recoded >> 3) - 22.0)
    assert torch.equal(torch.where(recoded == 0, 0.0, again), values)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["linear", "128x4"])
def test_there_and_back(shape, layout, monkeypatch):
    monkeypatch.setattr(fragment, "_PIECE", 4096)
    t = every_code_and_scale(*shape, layout=layout)
    packed = t.with_layout("fragment")
    assert packed.layout == "fragment"
    assert packed.shape == t.shape
    assert packed.scales.numel() == 0
    assert same_tensor(packed.with_layout(layout), t)
    assert packed.with_layout("fragment") is packed
    for read in (bs.dequantize, reference.dequantize):
        assert same_bits(read(packed), read(t))
    assert same_bits(packed.linear_scales(), t.linear_scales())


def test_the_same_number_of_bytes():
    t = every_code_and_scale(256, 512)
    assert t.with_layout("fragment").nbytes == t.nbytes == 256 * 512 * 9 // 16 + 4


def test_padding_is_zero():
    packed = every_code_and_scale(5, 40).with_layout("fragment")
    whole = bs.NVFP4Tensor(packed.codes, packed.scales, packed.global_scale, "fragment", torch.Size((16, 128)))
    values = whole.dequantize()
    assert values[5:].count_nonzero() == 0
    assert values[:, 40:].count_nonzero() == 0


@pytest.mark.parametrize("shape", [(0, 128), (0, 3, 40), (3, 0, 40), (0, 130)])
def test_no_rows_and_no_matrices(shape):
    t = bs.quantize(torch.zeros(shape))
    packed = t.with_layout("fragment")
    assert same_tensor(packed, bs.quantize(torch.zeros(shape), layout="fragment"))
    assert same_tensor(packed.with_layout("128x4"), t)
    assert packed.dequantize().shape == shape
    some = bs.quantize(torch.randn(2, 20, 40)).with_layout("fragment")
    assert some[0, 3:3].shape == (0, 40)
    assert some[1:1].shape == (0, 20, 40)
    assert bs.gemm(torch.randn(3, 40), some[0, 3:3]).shape == (3, 0)


@pytest.mark.parametrize("shape", [(17, 64), (33, 200), (16, 101), (5, 128)])
def test_what_comes_has_its_padding_cleared(shape, tmp_path):
    """Kernels multiply what is in padding, by zero, which is not zero for every garbage."""
    t = every_code_and_scale(*shape).with_layout("fragment")
    n, k = shape
    inside = bs.NVFP4Tensor.from_parts(
        torch.full((n, -(-k // 2)), 0xFF, dtype=torch.uint8),
        torch.full((n, -(-k // 16)), 0x7E, dtype=torch.uint8).view(torch.float8_e4m3fn),
        shape=shape,
        layout="linear",
    ).with_layout("fragment")
    dirty = torch.where(inside.codes == 0, 0xFF, t.codes)
    again = bs.NVFP4Tensor.from_parts(dirty, t.scales, t.global_scale, shape=shape, layout="fragment")
    assert (dirty != t.codes).any()
    assert same_tensor(again, t)
    path = tmp_path / "w.safetensors"
    t.save(path)
    parts = {**load_file(path), "codes": dirty}
    with safe_open(path, framework="pt") as file:
        save_file(parts, path, file.metadata())
    assert same_tensor(bs.NVFP4Tensor.load(path), t)
    whole = every_code_and_scale(32, 256).with_layout("fragment")
    same = bs.NVFP4Tensor.from_parts(whole.codes, whole.scales, shape=(32, 256), layout="fragment")
    assert same.codes is whole.codes  # without padding nothing is copied


def test_a_scale_of_nan_is_nan():
    """Also for kernels: 31 and 7 are the exponent and mantissa of a NaN in bf16 and fp16 alike."""
    t = every_code_and_scale(33, 200, layout="linear")
    t.scales.view(torch.uint8)[3, 4] = 0x7F
    packed = t.with_layout("fragment")
    assert int(fragment._recode(torch.tensor(0x7F, dtype=torch.uint8))) == 31 << 3 | 7
    assert packed.linear_scales().view(torch.uint8)[3, 4] == 0x7F
    assert packed.dequantize()[3, 64:80].isnan().all()
    assert packed.dequantize().isnan().sum() == 16


def test_batches():
    t = bs.quantize(torch.randn(2, 3, 20, 200))
    packed = t.with_layout("fragment")
    assert packed.codes.shape == (2, 3, 2, 2, 1152)
    assert same_tensor(packed.with_layout("128x4"), t)
    assert same_tensor(packed[1, 2], t[1, 2].with_layout("fragment"))
    assert same_tensor(packed[0, :, :7, 16:64], t[0, :, :7, 16:64].with_layout("fragment"))


def test_saved_loaded_pickled_moved_and_copied(tmp_path):
    packed = every_code_and_scale(33, 200).with_layout("fragment")
    packed.save(tmp_path / "w.safetensors")
    for again in (
        bs.NVFP4Tensor.load(tmp_path / "w.safetensors"),
        pickle.loads(pickle.dumps(packed)),
        copy.deepcopy(packed),
        bs.NVFP4Tensor.from_parts(
            packed.codes, packed.scales, packed.global_scale, shape=packed.shape, layout="fragment"
        ),
        packed.to("meta").to("meta"),
    ):
        assert (again.shape, again.layout) == (packed.shape, "fragment")
        assert again.device.type == "meta" or same_tensor(again, packed)


def test_a_tree_of_tensors_holds_it():
    from torch.utils import _pytree

    packed = every_code_and_scale(33, 200).with_layout("fragment")
    leaves, tree = _pytree.tree_flatten({"w": packed})
    assert same_tensor(_pytree.tree_unflatten(leaves, tree)["w"], packed)
    assert _pytree.treespec_loads(_pytree.treespec_dumps(tree)) == tree


@pytest.mark.parametrize("convention", ["blockscale", "modelopt", "compressed-tensors"])
def test_checkpoints_hold_the_common_order(convention, tmp_path):
    t = bs.quantize(torch.randn(20, 64))
    paths = [tmp_path / f"{name}.safetensors" for name in ("common", "packed")]
    for path, weight in zip(paths, (t, t.with_layout("fragment")), strict=True):
        bs.save_checkpoint({"fc.weight": weight}, path, to=convention)
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_products_and_operators_take_it():
    x, t = torch.randn(4, 200), bs.quantize(torch.randn(33, 200))
    packed = t.with_layout("fragment")
    assert same_bits(bs.gemm(x, packed), bs.gemm(x, t))
    assert same_bits(bs.gemm(bs.quantize(x), packed), bs.gemm(bs.quantize(x), t))
    alpha = torch.tensor(2.0, requires_grad=True)
    bs.gemm(x, packed, alpha=alpha, out_dtype=torch.float32).sum().backward()
    assert alpha.grad is not None
    compiled = torch.compile(lambda x: bs.gemm(x, packed), fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(x), bs.gemm(x, t))
    compiled = torch.compile(lambda x: bs.quantize(x, layout="fragment").dequantize(), backend="aot_eager")
    assert same_bits(compiled(x), bs.quantize(x).dequantize())


def test_compiled_for_weights_of_any_size():
    compiled = torch.compile(lambda x, w: bs.gemm(x, w), fullgraph=True, backend="aot_eager", dynamic=True)
    values = torch.compile(lambda w: w.dequantize(), fullgraph=True, backend="aot_eager", dynamic=True)
    for n, k in ((33, 200), (34, 200), (34, 328), (77, 640)):
        x, w = torch.randn(4, k), bs.quantize(torch.randn(n, k)).with_layout("fragment")
        assert same_bits(compiled(x, w), bs.gemm(x, w))
        assert same_bits(values(w), w.dequantize())


def test_what_is_refused():
    packed = every_code_and_scale(33, 200).with_layout("fragment")
    parts = packed.codes, packed.scales, packed.global_scale
    with pytest.raises(ValueError, match="shape: missing; layout 'fragment' needs it"):
        bs.NVFP4Tensor.from_parts(*parts, layout="fragment")
    with pytest.raises(ValueError, match=r"codes: .* expected torch.uint8 of shape \(4, 2, 1152\)"):
        bs.NVFP4Tensor.from_parts(*parts, layout="fragment", shape=(49, 200))
    every = torch.zeros(1, dtype=torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=r"scales: .* expected none beside units"):
        bs.NVFP4Tensor.from_parts(packed.codes, every, layout="fragment", shape=(33, 200))
    bad = every_code_and_scale(33, 200, layout="linear")
    bad.scales.view(torch.uint8)[3, 4] = 0x7F
    packed = bad.with_layout("fragment")
    with pytest.raises(ValueError, match=r"scales: byte 0x7F at \(row, block\) index \(3, 4\)"):
        bs.NVFP4Tensor.from_parts(packed.codes, packed.scales, layout="fragment", shape=(33, 200))


def _packed_layer(n=33, k=200):
    linear = torch.nn.Linear(k, n)
    return bs.nn.Linear.from_linear(linear), bs.nn.Linear.from_linear(linear).pack()


def test_a_packed_layer_computes_saves_and_loads_as_another():
    plain, packed = _packed_layer()
    x = torch.randn(5, 200)
    assert packed.layout == packed.weight.layout == "fragment"
    assert packed.pack() is packed
    assert same_bits(packed(x), plain(x))
    common, own = plain.state_dict(), packed.state_dict()
    assert own.keys() == common.keys()
    assert all(same_bits(own[name], common[name]) for name in own)
    other, _ = _packed_layer()
    before = packed.codes.data_ptr()
    packed.load_state_dict(other.state_dict())
    assert packed.codes.data_ptr() == before
    assert same_bits(packed(x), other(x))
    plain.load_state_dict(packed.state_dict())
    assert same_bits(packed(x), plain(x))
    wrong = {**other.state_dict(), "codes": torch.zeros(3, 3, dtype=torch.uint8)}
    with pytest.raises(RuntimeError, match="size mismatch for codes"):
        packed.load_state_dict(wrong)
    with pytest.raises(RuntimeError, match="Missing key"):
        packed.load_state_dict({"codes": plain.codes})


def test_a_packed_layer_takes_no_more_memory():
    _, packed = _packed_layer(256, 512)
    plain, _ = _packed_layer(256, 512)
    assert sum(b.nbytes for b in packed.buffers()) == sum(b.nbytes for b in plain.buffers())


def test_packed_layers_are_copied_cast_moved_compiled_and_given_weights():
    plain, packed = _packed_layer()
    x = torch.randn(5, 200)
    for again in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), copy.deepcopy(packed).half().float()):
        assert again.layout == "fragment"
        torch.testing.assert_close(again(x), plain(x), rtol=2e-3, atol=2e-3)  # the bias was in half
    compiled = torch.compile(packed, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        assert same_bits(compiled(x), plain(x))
    shared = bs.nn.Linear.from_weight(packed.weight)
    assert shared.codes is packed.codes
    packed.write(plain.weight, (), None)
    assert same_bits(packed(x), plain(x))
    assert packed.to("meta").codes.is_meta
    model = torch.nn.Sequential(plain, torch.nn.ReLU())
    model.apply(bs.nn.pack)
    assert plain.layout == "fragment"
