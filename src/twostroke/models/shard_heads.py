"""Which heads a rank of several has. Heads that make keys (or Mamba's b and c) serve others, in order: they go to ranks
with all that they serve. Where there are fewer of them than ranks, several ranks hold the same one, with some of those
that it serves each."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd, lcm

from twostroke.core.errors import ModelError
from twostroke.models.weights.runs import Cut


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank of several."""

    rank: int
    size: int

    def of(self, total: int, unit: int = 1, what: str = "rows") -> Cut:
        """Its run of `total` things, cut at multiples of `unit`; the first ranks have one unit more where they do not
        come out even. Raises ModelError where there is not one for each."""
        units = -(-total // unit)
        if units < self.size:
            apart = "" if unit == 1 else f", which stay together in runs of {unit},"
            raise ModelError(f"{total} {what}{apart} cannot be shared by {self.size} ranks")
        each, more = divmod(units, self.size)
        first = self.rank * each + min(self.rank, more)
        return min(first * unit, total), min((first + each + (self.rank < more)) * unit, total)


@dataclass(frozen=True, slots=True)
class HeadKind:
    """Heads that serve others, in words and in sizes."""

    many: str
    one: str
    served: str
    of_one: str
    """What it serves."""
    count: int
    """Of those that serve."""
    each: int
    """How many of the others each serves."""
    width: int
    """Of what one of the others hands to the output projection."""
    own_unit: int = 1
    """How many of those that serve stay together for their own matrices' sake."""


@dataclass(frozen=True, slots=True)
class HeadShare:
    """What a rank has: heads that serve, and of each those that it serves, by their number within it."""

    serving: Cut
    within: Cut
    place: Shard
    """Its place among the ranks that hold the same one."""

    def served(self, each: int) -> Cut:
        """Those that are served, where they lie in order of those that serve."""
        first, last = self.serving
        if last - first > 1:
            return first * each, last * each
        return first * each + self.within[0], first * each + self.within[1]


def together(unit: int, width: int) -> int:
    """Of things of this width, how many stay together so that cuts are multiples of `unit`."""
    return unit // gcd(unit, width)


def share_heads(shard: Shard, kind: HeadKind, output_unit: int) -> HeadShare:
    """`output_unit`: inputs of the output projection are cut at multiples of it. Raises ModelError, in one sentence,
    where that does not come out."""
    each, whole = kind.each, (0, kind.each)
    if kind.count >= shard.size:
        unit = lcm(together(output_unit, each * kind.width), kind.own_unit)
        return HeadShare(shard.of(kind.count, unit, kind.many), whole, Shard(0, 1))
    head, place = next(
        (head, Shard(shard.rank - first, last - first))
        for head in range(kind.count)
        for first, last in (Shard(head, kind.count).of(shard.size),)
        if first <= shard.rank < last
    )
    if head * each * kind.width % output_unit:
        raise ModelError(
            f"{kind.count} {kind.many} cannot be shared by {shard.size} ranks: between two of them, the output "
            f"projection cannot be cut, since {output_unit} of its columns stay together"
        )
    unit = together(output_unit, kind.width)
    if -(-each // unit) < place.size:
        apart = "" if unit == 1 else f", of which {unit} stay together,"
        raise ModelError(
            f"{kind.count * each} {kind.served} cannot be shared by {shard.size} ranks: {kind.one} has {each} "
            f"{kind.of_one}{apart} for {place.size} ranks"
        )
    return HeadShare((head, head + 1), place.of(each, unit), place)
