"""The command line: what it prints, on which stream, and with which exit code."""

import json
import subprocess
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import blockscale
from blockscale.cli import doctor
from blockscale.cli.app import app


def invoke(*arguments: str):
    return CliRunner().invoke(app, list(arguments))


def python(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


def assert_refused(result, *words: str) -> None:
    """Exit code 2, nothing on standard output, one line on standard error that holds every word."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("blockscale: ")
    assert result.stderr.count("\n") == 1
    for word in words:
        assert word in result.stderr


def test_python_dash_m_runs_and_reports_its_exit_code():
    version = python("-m", "blockscale", "--version")
    assert (version.returncode, version.stdout, version.stderr) == (0, f"{blockscale.__version__}\n", "")
    refused = python("-m", "blockscale", "gemm", "4", "4", "0")
    assert refused.returncode == 2
    assert refused.stdout == ""
    assert refused.stderr == "blockscale: K = 0, must be at least 1\n"


def test_help_names_every_command():
    result = invoke("--help")
    assert result.exit_code == 0
    for command in ("demo", "gemm", "inspect", "convert", "quantize", "explain", "compile", "doctor"):
        assert command in result.stdout
    assert invoke().exit_code != 0
    assert invoke("nonsense").exit_code == 2


# gemm


@pytest.mark.parametrize("arguments", [[], ["--weight-only"]])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_gemm_reports_the_error_in_units_of_the_tolerance(arguments, dtype):
    result = invoke("gemm", "300", "70", "100", "--out-dtype", dtype, *arguments, "--json")
    assert result.exit_code == 0, result.output
    assert result.stderr == ""  # no progress where there is no terminal
    outcome = json.loads(result.stdout)
    assert (outcome["m"], outcome["n"], outcome["k"], outcome["out_dtype"]) == (300, 70, 100, dtype)
    assert outcome["weight_only"] == bool(arguments)
    assert outcome["passed"] is True
    assert 0 < outcome["max_error"] < 1
    assert 0 < outcome["error_in_tolerances"] <= 1
    assert outcome["gflops"] == pytest.approx(2 * 300 * 70 * 100 / outcome["seconds"] / 1e9)


def test_gemm_is_a_function_of_the_seed():
    def error(seed: int, method: str = "rtn") -> float:
        result = invoke(
            "gemm", "8", "8", "64", "--seed", str(seed), "--method", method, "--out-dtype", "fp32", "--json"
        )
        return json.loads(result.stdout)["max_error"]

    assert error(1) == error(1)
    assert len({error(1), error(2), error(1, "four_over_six"), error(1, "mse")}) == 4


def test_gemm_shows_a_table():
    result = invoke("gemm", "5", "6", "70", "--weight-only")
    assert result.exit_code == 0
    for text in ("5 x 6 x 70, rtn, weight only, bf16", " ms", "GFLOP/s", "in units of the tolerance", "kept"):
        assert text in result.stdout


@pytest.mark.parametrize(("m", "n"), [(0, 4), (4, 0)])
def test_gemm_of_nothing_is_right(m, n):
    result = invoke("gemm", str(m), str(n), "16", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["max_error"] == 0


@pytest.mark.parametrize(
    ("wrong", "max_error"), [(lambda y: y[-1, -1].add_(1), 1.0), (lambda y: y[-1, -1].fill_(torch.nan), None)]
)
def test_gemm_fails_when_one_element_breaks_the_contract(monkeypatch, wrong, max_error):
    right = blockscale.gemm

    def broken(*operands, **options):
        y = right(*operands, **options)
        wrong(y)
        return y

    monkeypatch.setattr(blockscale, "gemm", broken)
    result = invoke("gemm", "300", "7", "64", "--out-dtype", "fp32", "--json")
    assert result.exit_code == 1
    assert "further from the reference" in result.stderr
    outcome = json.loads(result.stdout)
    assert outcome["passed"] is False
    assert outcome["max_error"] == (None if max_error is None else pytest.approx(max_error, abs=1e-3))
    text = invoke("gemm", "300", "7", "64")
    assert text.exit_code == 1
    assert "broken" in text.stdout


@pytest.mark.parametrize(("sizes", "named"), [(("4", "4", "0"), "K = 0"), (("-1", "4", "16"), "M = -1")])
def test_gemm_refuses_sizes(sizes, named):
    assert_refused(invoke("gemm", "--", *sizes), named, "must be at least")
    as_json = invoke("gemm", "--json", "--", *sizes)
    assert as_json.exit_code == 2
    assert named in json.loads(as_json.stdout)["error"]


def test_a_refusal_of_the_library_is_one_line(monkeypatch):
    def refuse(*operands, **options):
        raise ValueError("a: the first line\nand a second")

    monkeypatch.setattr(blockscale, "gemm", refuse)
    assert_refused(invoke("gemm", "4", "4", "16"), "a: the first line and a second")


# doctor


def test_doctor_lists_every_backend_and_why_it_cannot_run():
    backends = blockscale.available_backends()
    document = json.loads(invoke("doctor", "--json").stdout)
    assert document["backends"] == backends
    assert document["backends"]["cpu"] is None
    assert document["torch"] == torch.__version__
    result = invoke("doctor")
    assert result.exit_code == 0
    for name, reason in backends.items():
        assert name in result.stdout
        assert (reason or "yes").split()[0] in result.stdout
    assert "Python" in result.stdout
    assert "CuTe DSL" in result.stdout


def test_doctor_fails_when_nothing_can_run(monkeypatch):
    monkeypatch.setattr(blockscale, "available_backends", lambda: {"cpu": "no", "sm90": "no"})
    result = invoke("doctor")
    assert result.exit_code == 1
    assert result.stderr == "blockscale: no backend can run here\n"


def test_doctor_describes_gpus(monkeypatch, tmp_path):
    gpu = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=141 * 2**30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    version = tmp_path / "version"
    version.write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version: 13\n"
    )
    monkeypatch.setattr(doctor, "DRIVER_FILE", version)
    cuda = json.loads(invoke("doctor", "--json").stdout)["cuda"]
    assert cuda == {
        "built_for": "13.0",
        "driver": "580.65.06",
        "gpus": [{"name": "NVIDIA H200", "capability": "9.0", "memory_gib": 141.0, "kernels": "sm_90a"}],
        "problem": None,
    }
    assert "NVIDIA H200, sm_90, 141.0 GiB" in invoke("doctor").stdout


@pytest.mark.parametrize("capability", [(8, 9), (12, 2), (13, 0)])
def test_doctor_says_of_a_gpu_without_kernels_that_there_are_none(monkeypatch, capability):
    major, minor = capability
    gpu = SimpleNamespace(name="NVIDIA GPU", major=major, minor=minor, total_memory=2**30)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    document = json.loads(invoke("doctor", "--json").stdout)
    assert document["cuda"]["gpus"][0]["kernels"] is None
    assert f"no kernels of this version are for {major}.{minor}" in document["backends"]["sm120"]
    shown = " ".join(invoke("doctor").stdout.split())
    assert f"sm_{major}{minor}, 1.0 GiB; no kernels for it, they are for 10.0 (sm_100a)" in shown


def test_doctor_survives_a_broken_driver(monkeypatch, tmp_path):
    def fail(*arguments):
        raise RuntimeError("the driver is broken")

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", fail)
    monkeypatch.setattr(doctor, "DRIVER_FILE", tmp_path / "missing")
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["cuda"] == {
        "built_for": "13.0",
        "driver": None,
        "gpus": [],
        "problem": "the driver is broken",
    }


def test_doctor_passes_on_what_torch_warns_of(monkeypatch):
    def warn() -> int:
        warnings.warn("the driver is too old", stacklevel=1)
        return 0

    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "device_count", warn)
    result = invoke("doctor", "--json")
    assert result.exit_code == 0
    assert result.stderr == ""
    assert json.loads(result.stdout)["cuda"]["problem"] == "the driver is too old"
