"""`blockscale explain` and `blockscale compile`."""

import json

import pytest
import torch
from typer.testing import CliRunner

import blockscale as bs
from blockscale import compile as compiler
from blockscale import expansion, plan
from blockscale.cli.app import app
from blockscale.cli.compile import read
from blockscale.problem import Problem, target_named
from blockscale.quantize import device
from blockscale.store import Store


def invoke(*arguments):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refused(result, message):
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1


def test_explain():
    result = invoke("explain", 512, 4096, 7168, "--gpu", "b200")
    assert result.exit_code == 0
    assert result.stdout == bs.explain(512, 4096, 7168, gpu="b200") + "\n"
    document = json.loads(invoke("explain", 512, 4096, 7168, "--gpu", "b200", "--json").stdout)
    assert document["config"]["tile"] == list(bs.config_for(512, 4096, 7168, gpu="b200").tile)
    assert [f"{i}. {reason}" for i, reason in enumerate(document["reasons"], 1)] == result.stdout.splitlines()[1:]
    assert (document["gpu"], document["sms"]) == ("b200", 148)


def test_explain_refuses():
    refused(invoke("explain", 1, 1, 0, "--gpu", "b200"), "k: 0, expected at least 1")
    refused(
        invoke("explain", 1, 1, 1, "--gpu", "sm_110a"),
        "gpu: 'sm_110a' is Thor, for which this version has no kernels; expected 'b200' (sm_100a), 'b300' (sm_103a),",
    )


def test_doctor_tells_of_what_kernels_need(tmp_path, monkeypatch):
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))
    monkeypatch.setenv("CC", "no-such-compiler")
    found = json.loads(invoke("doctor", "--json").stdout)
    assert found["kernel_store"] == str(tmp_path)
    assert found["c_compiler"] is None
    assert "emulated('sm_100a')" in (found["backends"]["sm100"] or "emulated('sm_100a')")
    text = invoke("doctor").stdout
    for part in ("TVM-FFI", "C compiler", "not found; it links kernels", str(tmp_path)):
        assert part in text.replace("\n", "")


def test_a_file_of_shapes(tmp_path):
    path = tmp_path / "shapes"
    path.write_text("# M N K\n128 4096 7168\n\n1, 2, 3  # the smallest\n4x5x6\n128 4096 7168\n")
    expected = [Problem(*sizes, out_dtype="fp16") for sizes in ((128, 4096, 7168), (1, 2, 3), (4, 5, 6))]
    assert read(path, "fp16", target_named("b200")) == expected
    weight_only = [Problem(p.m, p.n, p.k, a="fp16", out_dtype="fp16") for p in expected]
    assert read(path, "fp16", target_named("h200")) == weight_only
    path.write_bytes(b"\xef\xbb\xbf1 2 3\n")  # as some editors begin a file
    assert read(path, "fp16", target_named("b200")) == expected[1:2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 2\n", "line 1: '1 2', expected three integers M N K"),
        ("1 2 3\n1 -2 3\n", "line 2: '1 -2 3'"),
        ("a b c", "line 1"),
        ("# nothing\n", "no shapes in it"),
        ("1 2 3\n0 2 3\n", "line 2: m: 0, expected at least 1"),
        ("\udcff", "not a text file in UTF-8"),
    ],
)
def test_a_file_of_something_else(tmp_path, text, message):
    path = tmp_path / "shapes"
    path.write_bytes(text.encode(errors="surrogateescape"))
    refused(invoke("compile", "--gpu", "b200", "--shapes", path, "--store", tmp_path / "store"), message)
    assert not (tmp_path / "store").exists()


def test_compile_refuses(tmp_path):
    path = tmp_path / "shapes"
    refused(invoke("compile", "--gpu", "b200", "--shapes", path), "No such file")
    refused(invoke("compile", "--gpu", "b200"), "--shapes, --quantize, --expand: none given")
    refused(invoke("compile", "--gpu", "b200", "--expand"), "--expand: b200 multiplies NVFP4 as it is")
    path.write_text("1 2 3\n")
    refused(invoke("compile", "--gpu", "sm_110a", "--shapes", path), "'sm_110a' is Thor")
    refused(invoke("compile", "--gpu", "b200", "--sms", 149, "--shapes", path), "--sms: 149, expected 1 to 148")
    refused(invoke("compile", "--gpu", "b200", "--shapes", path, "--store", path), "cannot be written")


def test_compile_fills_a_store_once(tmp_path):
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    path, root = tmp_path / "shapes", tmp_path / "store"
    path.write_text("128 4096 7168\n127 4096 64\n128 2048 64\n")
    asked = ("compile", "--gpu", "b200", "--shapes", path, "--store", root, "--out-dtype", "fp32")
    first = json.loads(invoke(*asked, "--json").stdout)
    (kernel,) = first["kernels"]  # one configuration serves all three
    assert kernel["shapes"] == [[128, 4096, 7168], [127, 4096, 64], [128, 2048, 64]]
    assert (kernel["out_dtype"], kernel["config"]) == ("fp32", "tile 128x64, pdl True, release early")
    assert kernel["seconds"] > 0
    assert set(Store(root).get(kernel["key"]).parts) == {"object", "library", "ptx", "cubin"}
    again = invoke(*asked)
    assert again.exit_code == 0
    assert "was there" in again.stdout
    assert kernel["key"][:12] in again.stdout


def test_compile_makes_what_nvfp4_activations_take(tmp_path, monkeypatch):
    """With those in the store, a product of them has nothing left to compile."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    wanted = expansion.variants()
    assert len(set(wanted)) == 20
    kept = [variant for variant in wanted if (variant.layout, variant.factors) == ("linear", "beside")]
    monkeypatch.setattr(expansion, "variants", lambda: kept)
    path, root = tmp_path / "shapes", tmp_path / "store"
    path.write_text("1 40 200\n")
    asked = ("compile", "--gpu", "h200", "--shapes", path, "--expand", "--store", root)
    made = json.loads(invoke(*asked, "--json").stdout)["kernels"]
    ahead = [kernel for kernel in made if "ahead True" in kernel["config"]]
    assert len(made) == 2 * len(ahead) + 2
    assert made[-1]["config"] == "expand linear, bf16, 2, factors beside"
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(root))
    monkeypatch.setattr(plan, "_functions", {})
    monkeypatch.setattr(expansion, "_functions", {})
    monkeypatch.setattr(expansion, "build", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(compiler, "compile_kernel", lambda *_: pytest.fail("compiled again"))
    a = bs.quantize(torch.rand(1, 200), layout="linear")
    w = bs.quantize(torch.rand(40, 200)).with_layout("fragment")
    with bs.emulated("sm_90a") as gpu:
        bs.gemm(a, w)
    assert gpu.findings == []


def test_compile_makes_the_quantisers_kernels(tmp_path, monkeypatch):
    """With those in the store, `quantize` has nothing left to compile."""
    pytest.importorskip("cutlass", reason="CuTe DSL is not installed")
    wanted = device.variants("bf16", "mse", "rms_norm")
    assert len(set(wanted)) == 28
    kept = [
        variant for variant in wanted if variant.vectors and variant.weight == "fp32" and variant.layout == "linear"
    ]
    monkeypatch.setattr(device, "variants", lambda *given: kept if given == ("bf16", "mse", "rms_norm") else [])
    asked = ("compile", "--gpu", "h200", "--quantize", "bf16", "--method", "mse", "--before", "rms_norm")
    made = json.loads(invoke(*asked, "--store", tmp_path, "--json").stdout)["kernels"]
    assert [(kernel["config"], kernel["shapes"], kernel["linked"]) for kernel in made] == [
        ("quantize amax, bf16, rtn, linear, rms_norm, fp32, vectors", [], True),
        ("quantize codes, bf16, mse, linear, rms_norm, fp32, dynamic, vectors", [], True),
        ("quantize codes, bf16, mse, linear, rms_norm, fp32, vectors", [], True),
    ]
    assert invoke(*asked, "--store", tmp_path).stdout.count("was there") == 3
    monkeypatch.setenv("BLOCKSCALE_CACHE", str(tmp_path))
    monkeypatch.setattr(device, "_functions", {})
    monkeypatch.setattr(device, "build", lambda *_: pytest.fail("compiled again"))
    x, weight = torch.randn(2, 64).bfloat16(), torch.ones(64)
    with bs.emulated("sm_90a", sms=1) as gpu:
        for unit in (None, 0.01):
            bs.quantize(x, norm_weight=weight, method="mse", layout="linear", global_scale=unit)
        assert len(gpu.reports) == 3
