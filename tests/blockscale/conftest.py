"""The tests' own store of compiled kernels: empty at the start, shared by all workers, apart from the user's."""

import os

import pytest


@pytest.fixture(autouse=True, scope="session")
def kernel_store(tmp_path_factory):
    if "BLOCKSCALE_CACHE" in os.environ:  # a store that outlives the run: kernels are compiled once for many runs
        return os.environ["BLOCKSCALE_CACHE"]
    base = tmp_path_factory.getbasetemp()
    shared = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base
    os.environ["BLOCKSCALE_CACHE"] = str(shared / "kernels")
    return os.environ["BLOCKSCALE_CACHE"]
