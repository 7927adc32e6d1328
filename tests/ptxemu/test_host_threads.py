"""Several threads with emulators of their own: one is inside at a time, and CuTe DSL is left as it was."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest

pytest.importorskip("cutlass", reason="CuTe DSL is not installed")

import ptxemu
from ptxemu.host import installed


def test_one_thread_at_a_time() -> None:
    import cutlass.cute.export  # noqa: F401 (sets the provider)
    from cutlass.base_dsl.export import ExternalBinaryModule

    before = ExternalBinaryModule.load_provider.execution_engine_constructor
    inside: list[int] = []
    most: list[int] = []
    errors: list[BaseException] = []

    def work(seed: int) -> None:
        try:
            for _ in range(3):
                with installed(ptxemu.Device("sm_100a", seed=seed), []):
                    inside.append(seed)
                    time.sleep(0.01)
                    with installed(ptxemu.Device("sm_100a"), []):  # the same thread may
                        most.append(len(inside))
                    inside.remove(seed)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert most == [1] * 12
    after: Any = ExternalBinaryModule.load_provider.execution_engine_constructor
    assert after is before
