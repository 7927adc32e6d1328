"""For all tests: one torch thread a worker, repeatable random numbers, GPU tests only where a GPU is."""

import pytest
import torch
from hypothesis import settings

settings.register_profile("repeatable", derandomize=True, deadline=None, print_blob=True)
settings.load_profile("repeatable")


_RAN = set()  # ids of the tests that this process ran


@pytest.fixture(autouse=True)
def _one_thread_and_one_seed(request):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    _RAN.add(request.node.nodeid)


@pytest.fixture
def whole_file(request):
    """For a test of what the others of its file did; skips it unless this process has run all of them."""
    here = [item for item in request.session.items if item.path == request.path]
    selected = {item.originalname for item in here}
    if {name for name in vars(request.module) if name.startswith("test_")} - selected:
        pytest.skip("not all tests of this file were selected")
    if {item.nodeid for item in here} - _RAN:
        pytest.skip("not all tests of this file ran in this process")


def pytest_collection_modifyitems(items):
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no NVIDIA GPU here"))
