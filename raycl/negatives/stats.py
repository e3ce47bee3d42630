"""Statistics of a bank: rows, ages, norms and throughput."""

import time
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from raycl.display import Displayable, Table, format_bytes
from raycl.negatives.search import norms, written
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives

_WINDOW_S = 10  # rates are means over so many seconds


class RowStats(NamedTuple):
    """Counts of the written rows by step, and their norms."""

    num_rows: dict[int, int]  # by step
    norm_sum: float
    norm_min: float
    norm_max: float


def row_stats(rows: Negatives) -> RowStats:
    """Count the written rows by step, and measure their norms."""
    rows = written(rows)
    steps, num_rows = np.unique(rows.step, return_counts=True)
    lengths = norms(rows.rows)
    norm_min, norm_max = float(lengths.min(initial=np.inf)), float(lengths.max(initial=0))
    counts = dict(zip(steps.tolist(), num_rows.tolist(), strict=True))
    return RowStats(counts, float(lengths.sum()), norm_min, norm_max)


class ShardInfo(NamedTuple):
    """The attempt that a shard belongs to, its process, its slots in use, and its throughput.

    Rows are counted since the shard started; the rates are over the last seconds.
    """

    attempt: int
    pid: int
    num_slots: int
    puts: int
    reads: int
    puts_per_second: float
    reads_per_second: float


@final
class RateMeter:
    """Count in total and over the last seconds."""

    def __init__(self) -> None:
        self.total = 0
        self._started = time.monotonic()
        self._recent: deque[list[int]] = deque(maxlen=_WINDOW_S)  # [second, count]

    def count(self, num: int) -> None:
        """Add to the count of this second."""
        self.total += num
        second = int(time.monotonic())
        if not self._recent or self._recent[-1][0] != second:
            self._recent.append([second, 0])
        self._recent[-1][1] += num

    def per_second(self) -> float:
        """Return the mean of the last seconds, or since the start."""
        now = time.monotonic()
        recent = sum(num for second, num in self._recent if second > int(now) - _WINDOW_S)
        return recent / min(_WINDOW_S, max(now - self._started, 1.0))


@final
@dataclass(frozen=True, kw_only=True)
class ShardStats:
    """Node, process, capacity and restarts of one shard."""

    node_id: str
    node_ip: str
    pid: int
    rows: int
    num_bytes: int
    restarts: int


@final
@dataclass(frozen=True, kw_only=True)
class BankStats(Displayable):
    """Statistics of a bank.

    ``rows`` is the capacity, ``filled`` the number of written rows. An age is the newest step minus
    the row's own. ``age_histogram`` has pairs (bound, rows): the number of rows younger than the
    bound, but not than the bound before. Ages and norms are over the written rows, None while there
    are none. ``puts`` and ``reads`` count rows that workers wrote and read since the shards started;
    the rates are over the last 10 s. ``restarts`` counts the restarts of all shards.
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
        """Return the facts of the bank and a row for each shard."""
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
            (i, s.node_ip, s.node_id[:12], str(s.pid), s.rows, format_bytes(s.num_bytes), s.restarts)
            for i, s in enumerate(self.shards)
        ]
        columns = ("shard", "node", "node id", "pid", "rows", "memory", "restarts")
        return Table(title=f"bank {self.name}", facts=facts, columns=columns, rows=shards)


def sum_up(
    spec: BankSpec, shards: Sequence[ShardStats], row_parts: Sequence[RowStats], infos: Sequence[ShardInfo]
) -> BankStats:
    """Return the statistics of a bank from the statistics of slices of its rows and of its shards."""
    rows_of: Counter[int] = Counter()  # by step
    for part in row_parts:
        rows_of.update(part.num_rows)
    steps, num_rows = np.array(sorted(rows_of.items()), np.int64).reshape(-1, 2).T
    filled = int(num_rows.sum())
    ages = steps.max(initial=0) - steps
    return BankStats(
        name=spec.name,
        kind=spec.kind,
        output=spec.output,
        rows=spec.capacity,
        filled=filled,
        dim=spec.dim,
        dtype=spec.dtype,
        num_bytes=sum(shard.num_bytes for shard in shards),
        shards=tuple(shards),
        age_histogram=_histogram(ages, num_rows),
        puts=sum(info.puts for info in infos),
        reads=sum(info.reads for info in infos),
        puts_per_second=sum(info.puts_per_second for info in infos),
        reads_per_second=sum(info.reads_per_second for info in infos),
        restarts=sum(shard.restarts for shard in shards),
        newest_step=int(steps[-1]) if filled else None,
        age_mean=float(ages @ num_rows / filled) if filled else None,
        age_max=int(ages[0]) if filled else None,
        norm_mean=sum(part.norm_sum for part in row_parts) / filled if filled else None,
        norm_min=min(part.norm_min for part in row_parts) if filled else None,
        norm_max=max(part.norm_max for part in row_parts) if filled else None,
    )


def _histogram(ages: np.ndarray, num_rows: np.ndarray) -> tuple[tuple[int, int], ...]:
    """Count rows whose age is below 1, 2, 4, 8 and so on."""
    bins = [age.bit_length() for age in ages.tolist()]
    counts = np.bincount(bins, weights=num_rows)
    return tuple((1 << index, int(count)) for index, count in enumerate(counts))


def _or_none(value: float | None, form: str) -> str:
    return "none yet" if value is None else format(value, form)
