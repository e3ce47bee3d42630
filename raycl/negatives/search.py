"""Search for the nearest rows of a bank, slice by slice."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import numpy as np

from raycl.arguments import check_type
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, first_line
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class Neighbors(Displayable):
    """The rows nearest to one query, nearest first: k of them, or all rows if there are fewer.

    ``sample_id`` and ``step`` are int64 [k], ``similarity`` is the cosine, float32 [k]. ``newest_step`` is the whole
    bank's when it answered, so a row is ``newest_step - step`` steps old; -1 if no row was ever written.
    """

    sample_id: np.ndarray
    similarity: np.ndarray
    step: np.ndarray
    newest_step: int

    def __len__(self) -> int:
        return len(self.sample_id)

    def to_table(self) -> Table:
        """Return a table with a row for each neighbor."""
        # Ids and steps are text, so that they have no thousands separators.
        rows = zip(
            map(str, self.sample_id.tolist()),
            map("{:.4f}".format, self.similarity),
            map(str, self.step.tolist()),
            strict=True,
        )
        columns, facts = ("sample_id", "similarity", "step"), {"newest step": str(self.newest_step)}
        return Table(title=f"{len(self)} nearest rows", facts=facts, columns=columns, rows=list(rows))


@final
@dataclass(frozen=True, kw_only=True, eq=False)
class SampleRows:
    """The rows of some samples.

    ``rows`` is [n, dim], float32 or float16; ``sample_id`` and ``step`` are int64 [n]. ``newest_step`` is the whole
    bank's when it answered; -1 if no row was ever written.
    """

    rows: np.ndarray
    sample_id: np.ndarray
    step: np.ndarray
    newest_step: int

    def __len__(self) -> int:
        return len(self.rows)


def newest_step(rows: Negatives) -> int:
    """Return the newest step of these rows; -1 if none was ever written."""
    return int(rows.step.max(initial=-1))


def written(rows: Negatives) -> Negatives:
    """Return the rows that were ever written: their step is not -1."""
    is_written = rows.step >= 0
    return rows if is_written.all() else rows[is_written]


def norms(rows: np.ndarray) -> np.ndarray:
    """Return the norm of each row [n, dim], float32 [n]."""
    return np.linalg.norm(rows.astype(np.float32), axis=1)


def why_missing(sample_ids: Sequence[int], spec: BankSpec) -> str:
    """Return in one line that a bank has no row of these samples, and what to ask instead."""
    named = ", ".join(map(str, sample_ids[:5]))
    if spec.has_text_ids:
        return (
            f"the bank {spec.name!r} holds no row with the id {named} now: the ids of a queue of texts are hashes "
            "of the texts, not sample ids; choose an id that an answer has shown"
        )
    return f"the bank {spec.name!r} holds no row of sample {named} now; choose another sample"


def newest_of(found: SampleRows, sample_id: int, spec: BankSpec) -> np.ndarray:
    """Return the newest row of a sample, [dim], of its rows; raises ``ConfigError`` if there is none."""
    if len(found) == 0 or found.step.max() < 0:
        raise ConfigError(why_missing([sample_id], spec))
    return found.rows[found.step.argmax()]


def draw(rows: Negatives, num: int) -> np.ndarray:
    """Return the sample ids of ``num`` random written rows, or of all if there are fewer.

    Raises ``ConfigError`` for a number below 0 or no integer.
    """
    check_type("num", num, int)
    if num < 0:
        raise ConfigError(f"cannot draw {num} rows; ask for 0 or more")
    is_written = np.flatnonzero(rows.step >= 0)
    chosen = np.random.default_rng().choice(is_written, min(num, len(is_written)), replace=False)
    return rows.sample_id[chosen]


def checked_query(query: np.ndarray, k: int, *, dim: int) -> np.ndarray:
    """Return unit queries, float32 [n, dim], of one [dim] or several [n, dim].

    Raises:
        ConfigError: No array of numbers, another dim, NaN or infinite values, only zeros, or ``k`` below 1.
    """
    check_type("k", k, int)
    if k < 1:
        raise ConfigError(f"cannot look for {k} neighbors; ask for k of at least 1")
    try:
        queries = np.atleast_2d(np.asarray(query))
    except (
        TypeError,
        ValueError,
        RuntimeError,
    ) as error:  # rows of several lengths, a tensor with a gradient
        raise ConfigError(
            f"the query is no array of numbers: {first_line(error)}; of a tensor, give .detach().cpu().float().numpy()"
        ) from error
    if queries.ndim != 2 or queries.shape[1] != dim:
        raise ConfigError(
            f"the query does not fit the bank: it came as {list(np.shape(query))}; give [{dim}] or [n, {dim}]"
        )
    if queries.dtype.kind not in "fiu" or not np.isfinite(queries).all():
        raise ConfigError(f"the query is not finite numbers: it came as {queries.dtype}; give an embedding")
    lengths = np.linalg.norm(queries.astype(np.float64), axis=1, keepdims=True)
    if (lengths == 0).any():
        raise ConfigError("the query is all zeros, which have no direction; give an embedding")
    return (queries / lengths).astype(np.float32)


def row_lengths(rows: Negatives) -> np.ndarray:
    """Return the length of each row, float32 [n]; of a row of zeros a small number, so that its cosines are 0."""
    values = rows.rows.astype(np.float32, copy=False)
    return np.maximum(np.sqrt(np.einsum("ij,ij->i", values, values)), 1e-12)


def nearest(
    rows: Negatives, queries: np.ndarray, k: int, *, without: int | None, lengths: np.ndarray | None = None
) -> list[Neighbors]:
    """Return the k written rows nearest to each unit query, except rows of the sample ``without``.

    ``lengths`` are the ``row_lengths``, if they are known.
    """
    similarities = queries @ rows.rows.astype(np.float32, copy=False).T  # [num_queries, num_rows]
    similarities /= row_lengths(rows) if lengths is None else lengths
    skipped = rows.step < 0
    if without is not None:
        skipped |= rows.sample_id == without
    similarities[:, skipped] = -np.inf
    similarities[np.isnan(similarities)] = -np.inf  # of rows that are not finite
    newest = newest_step(rows)
    return [_best(rows, row, k, newest) for row in similarities]


def merge(parts: Sequence[Neighbors], k: int) -> Neighbors:
    """Return the k nearest of several answers to one query; among equals the newest first, then by id."""
    newest = max(part.newest_step for part in parts)
    names = ("sample_id", "similarity", "step")
    sample_id, similarity, step = (np.concatenate([getattr(part, name) for part in parts]) for name in names)
    order = np.lexsort((sample_id, -step, -similarity))[:k]
    return Neighbors(
        sample_id=sample_id[order], similarity=similarity[order], step=step[order], newest_step=newest
    )


def _best(rows: Negatives, similarity: np.ndarray, k: int, newest: int) -> Neighbors:
    # All rows that tie with the last one, so that the order of rows decides nothing.
    threshold = np.partition(similarity, -k)[-k] if k < len(similarity) else -np.inf
    near = np.flatnonzero((similarity >= threshold) & (similarity > -np.inf))
    found = Neighbors(
        sample_id=rows.sample_id[near], similarity=similarity[near], step=rows.step[near], newest_step=newest
    )
    return merge([found], k)
