"""Tiles on threads: same results, no trace left, and no dependence on the caller's thread settings."""

import os
import threading

import pytest
import torch
from operands import same_bits, same_tensor

import blockscale as bs
from blockscale import threads


@pytest.fixture
def two_threads():
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


def test_every_item_once_on_single_threaded_workers(two_threads):
    seen, counts = [], set()

    def task(item):
        seen.append(item)
        counts.add((threading.current_thread() is threading.main_thread(), torch.get_num_threads()))

    threads.map_each(task, range(20))
    assert sorted(seen) == list(range(20))
    assert counts == {(False, 1)}
    assert torch.get_num_threads() == 2
    started = []
    thread = threading.Thread(target=lambda: started.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert started == [2]


def test_an_error_in_a_worker_reaches_the_caller(two_threads):
    def task(item):
        if item == 3:
            raise ValueError("three")

    with pytest.raises(ValueError, match="three"):
        threads.map_each(task, range(5))
    assert torch.get_num_threads() == 2


def test_bits_do_not_depend_on_the_number_of_threads():
    x = torch.randn(900, 700)
    weight = torch.nn.Parameter(torch.randn(1100, 700))

    def results():
        a, b = bs.quantize(x, method="mse"), bs.quantize(weight)
        return a, b, bs.gemm(a, b, out_dtype=torch.float32), bs.gemm(x.bfloat16(), b, invariant=True)

    one = results()
    torch.set_num_threads(2)
    two = results()
    torch.set_num_threads(1)
    assert same_tensor(one[0], two[0])
    assert same_tensor(one[1], two[1])
    assert same_bits(one[2], two[2])
    assert same_bits(one[3], two[3])


@pytest.mark.parametrize("count", [1, 2])
def test_flushing_of_subnormals_is_neither_obeyed_nor_changed(count):
    if not torch.set_flush_denormal(False):
        pytest.skip("this processor cannot flush subnormals")
    x = torch.randn(600, 600) * 1e-40
    torch.set_num_threads(count)
    expected = bs.quantize(x)
    assert expected.codes.any()
    torch.set_flush_denormal(True)
    try:
        assert same_tensor(bs.quantize(x), expected)
        assert (torch.tensor(1e-40) * 1.0) == 0
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_works_in_a_forked_child(two_threads):
    threads.map_each(lambda item: None, range(4))
    child = os.fork()
    if child == 0:
        seen = []
        threads.map_each(seen.append, range(4))
        os._exit(0 if len(seen) == 4 else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_concurrent_calls(two_threads):
    b = bs.quantize(torch.randn(700, 256))
    inputs = [torch.randn(40, 256) for _ in range(6)]
    expected = [bs.gemm(x, b) for x in inputs]
    results = [None] * 6

    def work(i):
        for _ in range(5):
            results[i] = bs.gemm(inputs[i], b)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert all(same_bits(y, e) for y, e in zip(results, expected, strict=True))
