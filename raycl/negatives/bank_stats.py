"""What there is to know about a bank at one moment."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from raycl.display import Displayable, Table, format_bytes
from raycl.negatives.search import RowStats, add_up
from raycl.negatives.spec import BankSpec
from raycl.negatives.throughput import Throughput


@final
@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """One shard: where it is, what it can hold, and how often Ray has restarted it."""

    node_id: str
    node_ip: str
    pid: int
    rows: int
    num_bytes: int
    restarts: int


@final
@dataclass(frozen=True, kw_only=True)
class BankStats(Displayable):
    """A bank in numbers.

    ``rows`` may be held and ``filled`` were written. An age is the newest step minus the row's own;
    ``age_histogram`` holds pairs (bound, rows): so many rows are younger than the bound, but not
    than the bound before. Ages and norms are of the written rows, None while there are none.
    ``puts`` and ``reads`` count rows that workers wrote and read since the shards started; the
    rates are those of the last 10 s. ``restarts`` counts the times that a shard died and came back.
    """

    name: str
    kind: str
    output: str
    rows: int
    filled: int
    dim: int
    dtype: str
    num_bytes: int
    shards: tuple[ShardStats, ...]
    newest_step: int | None
    age_mean: float | None
    age_max: int | None
    age_histogram: tuple[tuple[int, int], ...]
    norm_mean: float | None
    norm_min: float | None
    norm_max: float | None
    puts: int
    reads: int
    puts_per_second: float
    reads_per_second: float
    restarts: int

    def to_table(self) -> Table:
        """Show what the rows are, how old, how long, and how many come and go; then the shards."""
        facts = {
            "kind": self.kind,
            "run": self.output,
            "rows": self.rows,
            "filled": self.filled,
            "dim": self.dim,
            "dtype": self.dtype,
            "memory": format_bytes(self.num_bytes),
            "newest step": _or_none(self.newest_step, ",d"),
            "mean age": _or_none(self.age_mean, ",.1f"),
            "oldest age": _or_none(self.age_max, ",d"),
            "mean norm": _or_none(self.norm_mean, ".4f"),
            "least norm": _or_none(self.norm_min, ".4f"),
            "largest norm": _or_none(self.norm_max, ".4f"),
            "puts": f"{self.puts:,} ({self.puts_per_second:,.1f} a second)",
            "reads": f"{self.reads:,} ({self.reads_per_second:,.1f} a second)",
            "restarts": self.restarts,
        }
        shards = [
            (
                number,
                each.node_ip,
                each.node_id[:12],
                str(each.pid),
                each.rows,
                format_bytes(each.num_bytes),
                each.restarts,
            )
            for number, each in enumerate(self.shards)
        ]
        columns = ("shard", "node", "node id", "pid", "rows", "memory", "restarts")
        return Table(title=f"bank {self.name}", facts=facts, columns=columns, rows=shards)


def sum_up(
    plan: BankSpec, shards: Sequence[ShardStats], census: Sequence[RowStats], traffic: Sequence[Throughput]
) -> BankStats:
    """Return the numbers of the whole bank."""
    all_rows = add_up(census) if census else None
    there = all_rows if all_rows and all_rows.num_filled else None
    ages = there.steps[-1] - there.steps if there else np.empty(0, np.int64)
    return BankStats(
        name=plan.name,
        kind=plan.kind,
        output=plan.output,
        rows=plan.capacity,
        filled=there.num_filled if there else 0,
        dim=plan.dim,
        dtype=plan.dtype,
        num_bytes=sum(shard.num_bytes for shard in shards),
        shards=tuple(shards),
        newest_step=int(there.steps[-1]) if there else None,
        age_mean=float(ages @ there.num_rows / there.num_filled) if there else None,
        age_max=int(ages[0]) if there else None,
        age_histogram=_histogram(ages, there.num_rows) if there else (),
        norm_mean=there.norm_sum / there.num_filled if there else None,
        norm_min=there.norm_min if there else None,
        norm_max=there.norm_max if there else None,
        puts=sum(each.puts for each in traffic),
        reads=sum(each.reads for each in traffic),
        puts_per_second=sum(each.puts_per_second for each in traffic),
        reads_per_second=sum(each.reads_per_second for each in traffic),
        restarts=sum(shard.restarts for shard in shards),
    )


def _or_none(value: float | None, form: str) -> str:
    return "none yet" if value is None else format(value, form)


def _histogram(ages: np.ndarray, num_rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Count rows whose age is below 1, 2, 4, 8 and so on."""
    bins = np.array([int(age).bit_length() for age in ages])
    counts = np.bincount(bins, weights=num_rows)
    return tuple((1 << index, int(count)) for index, count in enumerate(counts))
