"""Questions about rows, slice by slice: which are nearest, how old and how long they are."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np

from raycl.display import Displayable, Table
from raycl.errors import ConfigError
from raycl.negatives.store import Negatives


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbors(Displayable):
    """The rows nearest to one query, nearest first: at most k, fewer where there are fewer rows.

    ``sample_id`` and ``step`` are int64 [k], ``similarity`` is the cosine, float32 [k].
    """

    sample_id: np.ndarray
    similarity: np.ndarray
    step: np.ndarray

    def __len__(self) -> int:
        return len(self.sample_id)

    def to_table(self) -> Table:
        """Show a row a neighbor."""
        # Ids and steps as they are written elsewhere, without thousands parted.
        rows = zip(
            map(str, self.sample_id.tolist()),
            map("{:.4f}".format, self.similarity),
            map(str, self.step.tolist()),
            strict=True,
        )
        columns = ("sample_id", "similarity", "step")
        return Table(title=f"{len(self)} nearest rows", columns=columns, rows=list(rows))


class RowStats(NamedTuple):
    """What there is to tell about some rows: how many of each step, and their lengths."""

    steps: np.ndarray  # distinct, int64
    num_rows: np.ndarray  # of each of these steps, int64
    norm_sum: float
    norm_min: float
    norm_max: float

    @property
    def num_filled(self) -> int:
        """Rows that were written."""
        return int(self.num_rows.sum())


def written(rows: Negatives) -> Negatives:
    """Return the rows that were ever written, without those of step -1."""
    there = rows.step >= 0
    return rows if there.all() else Negatives(rows.rows[there], rows.sample_id[there], rows.step[there])


def checked_query(query: np.ndarray, k: int, *, dim: int) -> np.ndarray:
    """Return unit queries, float32 [n, dim], of one [dim] or several [n, dim].

    Raises:
        ConfigError: Another dim, NaN or infinite numbers, only zeros, or ``k`` below 1.
    """
    if k < 1:
        raise ConfigError(f"cannot look for {k} neighbors; ask for k of at least 1")
    queries = np.atleast_2d(np.asarray(query))
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ConfigError(
            f"the query does not fit the bank: it came as {list(np.shape(query))}; give [{dim}] or [n, {dim}]"
        )
    if queries.dtype.kind not in "fiu" or not np.isfinite(queries).all():
        raise ConfigError(f"the query is not finite numbers: it came as {queries.dtype}; give an embedding")
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    if (lengths == 0).any():
        raise ConfigError("the query is all zeros, which are near to nothing; give an embedding")
    return (queries / lengths).astype(np.float32)


def nearest(rows: Negatives, queries: np.ndarray, k: int, *, without: int | None) -> list[Neighbors]:
    """Return the k written rows nearest to each unit query, leaving out the sample ``without``."""
    asked = written(rows)
    units = asked.rows.astype(np.float32)
    units /= np.maximum(np.linalg.norm(units, axis=1, keepdims=True), 1e-12)
    similarities = queries @ units.T  # [num_queries, num_rows]
    if without is not None:
        similarities[:, asked.sample_id == without] = -np.inf
    return [_best(asked, row, k) for row in similarities]


def merge(parts: Sequence[Neighbors], k: int) -> Neighbors:
    """Return the k nearest of several answers to one query; of equals the newest first, then by id."""
    names = ("sample_id", "similarity", "step")
    sample_id, similarity, step = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    order = np.lexsort((sample_id, -step, -similarity))[:k]
    return Neighbors(sample_id=sample_id[order], similarity=similarity[order], step=step[order])


def take_census(rows: Negatives) -> RowStats:
    """Count the written rows by step, and measure them."""
    asked = written(rows)
    steps, num_rows = np.unique(asked.step, return_counts=True)
    norms = np.linalg.norm(asked.rows.astype(np.float32), axis=1)
    return RowStats(
        steps, num_rows, float(norms.sum()), float(norms.min(initial=np.inf)), float(norms.max(initial=0))
    )


def add_up(parts: Sequence[RowStats]) -> RowStats:
    """Return the census of all rows together."""
    steps, index = np.unique(np.concatenate([part.steps for part in parts]), return_inverse=True)
    num_rows = np.zeros(len(steps), np.int64)
    np.add.at(num_rows, index, np.concatenate([part.num_rows for part in parts]))
    return RowStats(
        steps,
        num_rows,
        sum(part.norm_sum for part in parts),
        min(part.norm_min for part in parts),
        max(part.norm_max for part in parts),
    )


def _best(rows: Negatives, similarity: np.ndarray, k: int) -> Neighbors:
    # With all that are equal to the last one taken, so that the order of rows decides nothing.
    last = np.partition(similarity, -k)[-k] if k < len(similarity) else -np.inf
    near = np.flatnonzero((similarity >= last) & (similarity > -np.inf))
    found = Neighbors(sample_id=rows.sample_id[near], similarity=similarity[near], step=rows.step[near])
    return merge([found], k)
