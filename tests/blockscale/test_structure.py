"""What the library shows to those who import it, and what an import costs."""

import subprocess
import sys


def test_import_brings_no_command_line_and_no_compiler():
    heavy = ("rich", "typer", "safetensors", "tokenizers", "cutlass", "ptxemu")
    script = f"import sys, blockscale; print(*[m for m in {heavy} if m in sys.modules])"
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == ""


def test_public_names():
    import blockscale

    assert set(blockscale.__all__) == {
        "Config",
        "NVFP4Tensor",
        "__version__",
        "available_backends",
        "config_for",
        "dequantize",
        "emulated",
        "explain",
        "gemm",
        "grouped_gemm",
        "ladder",
        "load_checkpoint",
        "nn",
        "persisting_l2",
        "quantize",
        "save_checkpoint",
    }
    for name in blockscale.__all__:
        assert getattr(blockscale, name).__doc__
