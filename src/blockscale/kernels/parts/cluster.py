"""Where a CTA is in its cluster, and which CTAs of the cluster it shares operands with."""

from dataclasses import dataclass

from cutlass import Boolean, Int32, cute

from blockscale.kernels.parts.geometry import Geometry, Shape

Number = int | Int32


@dataclass(frozen=True)
class Sharers:
    """CTAs of a cluster that need the same operand and fetch it for one another, each a part.

    Args:
        count: of them. rank: of this CTA among them. mask: a bit for each; None where this CTA is always the only one.
    """

    count: Number
    rank: Number
    mask: Number | None


@dataclass(frozen=True)
class Cluster:
    """A CTA at (x, y) of a cluster of width x height CTAs, x along m; ranks run along x first (PTX: %cluster_ctarank).

    A launch may mix two shapes: a CTA reads from registers which one it is in. Sizes are numbers of Python's where
    there is but one. CTAs at x = 0 and 1, 2 and 3, ... are pairs, where tiles are of `ctas` = 2.
    """

    width: Number
    height: Number
    x: Number
    y: Number
    ctas: int

    @staticmethod
    def here(geometry: Geometry, fallback: Shape | None) -> "Cluster":
        """This CTA's cluster, of the geometry's shape or of `fallback`, which divides it."""
        width, height = geometry.shape
        x, y, _ = cute.arch.block_in_cluster_idx()
        if fallback is not None:
            columns, rows, _ = cute.arch.block_in_cluster_dim()
            width, height = (width if fallback[0] == width else columns), (height if fallback[1] == height else rows)
        alone = Cluster(width, height, 0, 0, geometry.ctas)
        return Cluster(width, height, 0 if alone.one_wide else x, 0 if alone.one_high else y, geometry.ctas)

    @property
    def one_wide(self) -> bool:
        return isinstance(self.width, int) and self.width == 1

    @property
    def one_high(self) -> bool:
        return isinstance(self.height, int) and self.height == 1

    @property
    def alone(self) -> bool:
        """Whether there is no other CTA, in no cluster of the launch."""
        return self.one_wide and self.one_high

    @property
    def size(self) -> Number:
        return self.width * self.height

    @property
    def first(self) -> Boolean | bool:
        """Whether this CTA has rank 0."""
        return True if self.alone else cute.arch.block_idx_in_cluster() == 0

    @property
    def half(self) -> Number:
        """This CTA's place in its pair, 0 where there is none."""
        return self.x % 2 if self.ctas == 2 else 0

    @property
    def leader(self) -> Boolean | bool:
        """Whether this CTA issues the tensor core's instructions: the first of a pair, or any that is in none."""
        return self.half == 0

    @property
    def leader_rank(self) -> Int32 | None:
        """Of the CTA that issues this one's instructions; None where it is this one."""
        return self.x - self.half + self.y * self.width if self.ctas == 2 else None

    # Who needs the same: the same rows of a, the same codes of b, the same scales of b.

    @property
    def with_same_x(self) -> Sharers:
        return Sharers(self.height, self.y, None if self.one_high else _bits(self.height, self.width) << self.x)

    @property
    def with_same_half(self) -> Sharers:
        count = self.width // self.ctas
        only = isinstance(count, int) and count == 1
        mask = None if only else _bits(count, self.ctas) << self.half + self.y * self.width
        return Sharers(count, 0 if only else self.x // self.ctas, mask)

    @property
    def with_same_y(self) -> Sharers:
        return Sharers(self.width, self.x, None if self.one_wide else _bits(self.width, 1) << self.y * self.width)

    # To and from whom commits go.

    @property
    def own_pair(self) -> Number:
        return 3 << self.leader_rank

    @property
    def senders(self) -> Number:
        """Whose copies come to the CTAs that this one, a leader, issues for: they wait until these have read a slot."""
        column = _bits(self.height, self.width) << self.x
        own = column | column << 1 if self.ctas == 2 else column
        return own | _bits(self.width, 1) << self.y * self.width

    @property
    def receivers(self) -> Number:
        """How many leaders there are whose CTAs get copies from this CTA."""
        return self.width // self.ctas + self.height - 1


def _bits(count: Number, step: Number) -> Number:
    """1 + 2^step + 4^step + ..., so many of them."""
    if isinstance(count, int) and isinstance(step, int):
        return sum(1 << i * step for i in range(count))
    return ((Int32(1) << count * step) - 1) // ((Int32(1) << step) - 1)
