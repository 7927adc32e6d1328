"""A store of `naive_kernel.NaiveGemm`, so that the line around a kernel can be tested on a Hopper GPU.

    PYTHONPATH=src python tests/blockscale/line/naive_store.py DIRECTORY

compiles it for sm_90a, where CuTe DSL is installed. On the machine with the GPU, which needs torch, apache-tvm-ffi and
pytest but no compiler:

    PYTHONPATH=src BLOCKSCALE_CACHE=DIRECTORY python -m pytest tests/blockscale/line/test_gpu.py -m gpu
"""

import sys

from blockscale import store
from blockscale.config import Config
from blockscale.families.sm100 import ENTRY
from blockscale.problem import OUT_BYTES, Problem, Target

HOPPER = Target("sm_90a", "sm100", (9, 0), "naive on h200", sms=132, smem=232_448)
CONFIG = Config()


def origin(out_dtype):
    return store.origin(HOPPER, CONFIG, Problem(1, 1, 1, out_dtype=out_dtype))


def key(out_dtype):
    """What `plan` asks the store for."""
    return store.key_of(origin(out_dtype))


def fill(directory):
    from naive_kernel import NaiveGemm

    from blockscale import compile as compiler

    for out_dtype in OUT_BYTES:
        kernel = NaiveGemm(out_dtype)
        parts = compiler.compile_function(
            kernel,
            compiler.traced_arguments(ENTRY, Problem(1, 1, 1, out_dtype=out_dtype)),
            HOPPER.arch,
            "the naive kernel",
        )
        assert "library" in parts, "a C compiler has to link it"
        store.Store(directory).put(origin(out_dtype), parts)
        print(key(out_dtype), out_dtype)


if __name__ == "__main__":
    fill(sys.argv[1])
