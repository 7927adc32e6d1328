"""Sums of CTAs that share a tile and have a part of k each: added in the order of their ranks, so always alike.

The CTAs are a cluster and read each other's shared memory (PTX: mapa, ld.shared::cluster). What a thread of one writes,
a thread of another reads: the barriers release and acquire at the scope of the cluster.
"""

from dataclasses import dataclass
from typing import Any

from cutlass import Float32, Int32, cute

WORD_BYTES = 4
VECTOR = 4  # sums that a thread hands over at a time


@dataclass(frozen=True)
class Exchange:
    """Two barriers and a buffer in each CTA's shared memory: a round of vectors, one a thread for each of `vectors`.

    barrier                                        counts
    full, all CTAs have written theirs             1 arrival of each warp of each CTA
    empty, all CTAs have read what they need       the same

    Args:
        barriers: address of the two. buffer: address of the vectors. split: CTAs. warps: of each, that have sums.
        rank: of this CTA. thread: of this one among those that have sums.
    """

    barriers: Int32
    buffer: Int32
    split: int
    warps: int
    rank: Int32
    thread: Int32

    def initialise(self, barriers: cute.Pointer) -> None:
        """By one thread of each CTA, before the CTAs of the cluster meet."""
        for i in range(2):
            cute.arch.mbarrier_init(barriers + i, self.split * self.warps)

    def give(self, vectors: list[list[Int32]], parity: Int32) -> None:
        """This thread's vectors; returns once those of all CTAs are there. parity: 0 and 1 in turn."""
        wait(self.barriers + 8, parity ^ 1)
        for i, words in enumerate(vectors):
            _store(self._place(i), words)
        self._tell(self.barriers)
        wait(self.barriers, parity)

    def take(self, i: int) -> list[Float32]:
        """The sum of all CTAs' vectors number `i` of this thread."""
        total = _load(self._place(i), Int32(0))
        for rank in range(1, self.split):
            total = [x + y for x, y in zip(total, _load(self._place(i), Int32(rank)), strict=True)]
        return total

    def taken(self) -> None:
        """The warp has what it needs of this round."""
        self._tell(self.barriers + 8)

    def _place(self, i: int) -> Int32:
        return self.buffer + (self.thread + i * self.warps * 32) * (VECTOR * WORD_BYTES)

    @cute.jit
    def _tell(self, barrier):
        """An arrival at this barrier in every CTA, of what all lanes of the warp did before."""
        cute.arch.sync_warp()
        lane = cute.arch.lane_idx()
        if lane < self.split:
            cute.arch.inline_ptx(
                "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, {$r0}, {$r1};\n"
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [there];\n}",
                read_only_args=[barrier, lane],
            )


def wait(barrier: Int32, parity: Int32) -> None:
    """For the phase of this parity, of arrivals from anywhere in the cluster."""
    cute.arch.inline_ptx(
        "{\n.reg .pred done;\nAGAIN:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [{$r0}], {$r1};\n@!done bra AGAIN;\n}",
        read_only_args=[barrier, parity],
    )


def _store(address: Int32, words: list[Int32]) -> None:
    cute.arch.inline_ptx("st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words])


def _load(address: Int32, rank: Int32) -> Any:
    return cute.arch.inline_ptx(
        "{\n.reg .b32 there;\nmapa.shared::cluster.u32 there, {$r0}, {$r1};\n"
        "ld.shared::cluster.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [there];\n}",
        write_only_types=[Float32] * VECTOR,
        read_only_args=[address, rank],
    )
