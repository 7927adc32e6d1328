"""What took time in a launch, for its trace."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Span"]


class Span(NamedTuple):
    """A warp's life, a wait of a warp, or an asynchronous operation from its issue to its completion.

    cta, warp: whose it is, the CTA's index in the grid and the warp's in the CTA; an operation's is the issuing one.
    what: of an operation, its name.  line: of the PTX; 0: none.  start, end: of the grid's `now`; an operation starts
    when nothing has to complete before it any more, which may be later than when it was `issued`.
    """

    cta: tuple[int, int, int]
    warp: int
    what: str
    line: int
    start: int
    end: int
    issued: int
