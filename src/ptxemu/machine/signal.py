"""How a warp waits: a `Wait` on a `Signal`, re-examined whenever the signal's owner says that it changed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ptxemu.machine.warp import Group

__all__ = ["Signal", "Wait"]


class Signal:
    """Something that warps wait for.  Its owner calls `changed` after every change that may end a wait."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Group] = []  # in the order of arrival, which is what makes runs repeat

    def changed(self) -> None:
        """Releases every group whose wait is over."""
        if self.waiting:
            still = []
            for group in self.waiting:
                if group.wait is not None and group.wait.ready():
                    group.release()
                else:
                    still.append(group)
            self.waiting = still


@dataclass(slots=True)
class Wait:
    """What a blocking instruction yields: it goes on once `ready()`, examined now and after `signal.changed()`.

    what: what it waits for, with the state as it is when called; for the deadlock report.
    may_expire: it may also end before it is ready, which the instruction then has to see for itself.
    """

    signal: Signal
    ready: Callable[[], bool]
    what: Callable[[], str]
    may_expire: bool = False
