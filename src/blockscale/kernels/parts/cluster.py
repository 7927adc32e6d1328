"""Where a CTA is in its cluster, and which CTAs of the cluster it shares operands with."""

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from blockscale.kernels.parts.geometry import Geometry

Number = int | Int32


@dataclass(frozen=True)
class Cluster:
    """A CTA at (x, y) of a cluster of width x height CTAs, x along m; ranks run along x first (PTX: %cluster_ctarank).

    A launch may mix two shapes: a CTA reads from registers which one it is in. Sizes are numbers of Python's where
    there is but one.

    CTAs of one x need the same rows of a; those of one y the same scales of b, and of b's codes the same as those
    whose place in their pair is the same.
    """

    width: Number
    height: Number
    x: Number
    y: Number
    pair: bool

    @staticmethod
    def here(geometry: Geometry, fallback: tuple[int, int] | None) -> "Cluster":
        width, height = geometry.shape
        if (width, height) == (1, 1):
            return Cluster(1, 1, 0, 0, False)
        x, y, _ = cute.arch.block_in_cluster_idx()
        if fallback is None:
            return Cluster(width, height, x, y if height > 1 else 0, geometry.pair)
        width, height, _ = cute.arch.block_in_cluster_dim()
        return Cluster(width, height, x, y, geometry.pair)

    @property
    def alone(self) -> bool:
        """Whether there is no other CTA, in no cluster of the launch."""
        return isinstance(self.width, int) and self.width * self.height == 1

    @property
    def ctas(self) -> Number:
        return self.width * self.height

    @property
    def leader(self) -> Boolean | bool:
        """Whether this CTA issues the tensor core's instructions: the first of a pair, or any that is in none."""
        return self.x % 2 == 0 if self.pair else True

    @property
    def leader_rank(self) -> Int32 | None:
        """Of the CTA that issues this one's instructions; None where it is this one."""
        return (self.x & -2) + self.y * self.width if self.pair else None

    @property
    def first(self) -> Boolean | bool:
        """Whether this CTA has rank 0."""
        return True if self.alone else cute.arch.block_idx_in_cluster() == 0

    # CTAs of the cluster, a bit each.

    @property
    def same_x(self) -> Number:
        return _bits(self.height, self.width) << self.x

    @property
    def same_y(self) -> Number:
        return _bits(self.width, 1) << self.y * self.width

    @property
    def same_half(self) -> Number:
        """Of those with the same y, the ones in the same place in their pair."""
        return _bits(self.width // 2, 2) << self.x % 2 + self.y * self.width if self.pair else self.same_y

    @property
    def own_pair(self) -> Number:
        return 3 << (self.x & -2) + self.y * self.width

    @property
    def senders(self) -> Number:
        """Whose copies come to the CTAs that this one, a leader, issues for: they wait until these have read a slot."""
        columns = self.same_x | self.same_x << 1 if self.pair else self.same_x
        return columns | self.same_y

    @property
    def receivers(self) -> Number:
        """How many leaders there are whose CTAs get copies from this CTA."""
        return (self.width // 2 if self.pair else self.width) + self.height - 1


def _bits(count: Number, step: Number) -> Number:
    """1 + 2^step + 4^step + ..., so many of them."""
    if isinstance(count, int) and isinstance(step, int):
        return sum(1 << i * step for i in range(count))
    return ((Int32(1) << count * step) - 1) // ((Int32(1) << step) - 1)
