"""The rows that a run has saved, in this process, to be asked as a bank is."""

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import final

import numpy as np

from raycl.data.embeddings import read_embeddings
from raycl.embedding_snapshot import LATEST, read_probe_set, read_snapshot
from raycl.errors import ConfigError, DataError
from raycl.negatives.actor import MemoryBankActor, QueueActor
from raycl.negatives.search import (
    Neighbors,
    SampleRows,
    checked_query,
    draw,
    merge,
    nearest,
    newest_of,
    newest_step,
    row_lengths,
)
from raycl.negatives.snapshot import ROWS_PER_GROUP, saved_spec
from raycl.negatives.spec import BankSpec
from raycl.negatives.stats import BankStats, row_stats, sum_up
from raycl.negatives.store import Negatives, concatenate
from raycl.records import run_name
from raycl.storage import Place, absolute


@final
class SavedBank:
    """Rows that answer the questions of a ``Bank``, of the kind of bank ``kind`` or ``embeddings``."""

    def __init__(self, spec: BankSpec, rows: Negatives, kind: str) -> None:
        self.spec, self._rows = spec, rows
        slices = list(self._slices())
        self._measured = [(each, row_lengths(each)) for each in slices]
        stats = sum_up(spec, [], list(map(row_stats, slices)), [])  # without shards
        num_bytes = sum(each.nbytes for each in rows.arrays())
        self._stats = replace(stats, name=run_name(Place(stats.output)), kind=kind, num_bytes=num_bytes)

    def get(self, sample_id: np.ndarray) -> SampleRows:
        """Return the rows of these samples, int64 [n]."""
        found = self._rows[np.flatnonzero(np.isin(self._rows.sample_id, sample_id))]
        return SampleRows(**vars(found), newest_step=newest_step(self._rows))

    def draw(self, num: int) -> np.ndarray:
        """Return the sample ids of ``num`` random rows, or of all if there are fewer."""
        return draw(self._rows, num)

    def nearest(self, query: np.ndarray, k: int = 10) -> list[Neighbors]:
        """Return the k rows of the highest cosine for each query, as :meth:`Bank.nearest` does."""
        return self._nearest(query, k, without=None)

    def nearest_of(self, sample_id: int, k: int = 10) -> Neighbors:
        """Return the rows nearest to the newest row of a sample, as :meth:`Bank.nearest_of` does."""
        row = newest_of(self.get(np.array([sample_id])), sample_id, self.spec)
        return self._nearest(row, k, without=sample_id)[0]

    def stats(self) -> BankStats:
        """Return the number and the measures of all rows, which do not change."""
        return self._stats

    def _nearest(self, query: np.ndarray, k: int, *, without: int | None) -> list[Neighbors]:
        queries = checked_query(query, k, dim=self.spec.dim)
        parts = [
            nearest(rows, queries, k, without=without, lengths=lengths) for rows, lengths in self._measured
        ]
        return [merge(of_one, k) for of_one in zip(*parts, strict=True)]

    def _slices(self) -> Iterator[Negatives]:
        """Yield all rows in slices, whose copies take little memory."""
        for start in range(0, max(len(self._rows), 1), ROWS_PER_GROUP):
            yield self._rows[start : start + ROWS_PER_GROUP]


def read_saved_bank(run: str, *, has_text_ids: bool = False) -> SavedBank:
    """Read the last snapshot of a run's bank, or else its embedding snapshot of a few samples.

    ``has_text_ids`` is as in ``BankSpec``, since the snapshot does not say it. Raises ``StorageError``, and ``ConfigError``
    if the run has neither.
    """
    place = Place(absolute(run))
    spec = saved_spec(place.uri)
    if spec is not None and spec.kind != "partition":
        kind = QueueActor if spec.kind == "queue" else MemoryBankActor
        shards: list[Negatives] = []
        for shard in range(spec.num_shards):
            actor = kind(spec, shard)
            actor.load_once()  # the constructor suppresses errors
            shards.append(actor.store.negatives())
        return SavedBank(replace(spec, has_text_ids=has_text_ids), concatenate(shards), spec.kind)
    probes, snapshot = read_probe_set(place), read_snapshot(place, LATEST)
    if probes is None or snapshot is None or len(probes.sample_id) != len(snapshot.embedding):
        raise ConfigError(
            f"{run} has neither a snapshot of a bank nor one of embeddings; embed a data set by `raycl embed --run "
            f"{run}`, and give it by --embeddings"
        )
    return _embedded(place, probes.sample_id, snapshot.embedding, snapshot.step)


def read_embedded(run: str, uri: str) -> SavedBank:
    """Read embeddings that ``raycl embed`` wrote; raises ``DataError`` and ``StorageError``.

    Rows of zeros are near nothing: they are skipped, and a line counts them.
    """
    parts, num_zero = list[tuple[np.ndarray, np.ndarray]](), 0
    for some, found in read_embeddings(uri, "sample_id", may_be_zero=True):
        is_row = found.any(axis=1)
        num_zero += int((~is_row).sum())
        parts.append((some[is_row], found[is_row]))
    if num_zero:
        print(f"{num_zero:,} embeddings in {uri} are zero and were skipped", file=sys.stderr)
    if not sum(len(some) for some, _ in parts):
        rows = "rows but zeros" if num_zero else "rows"
        raise DataError(f"{uri} has no {rows}; embed a data set by `raycl embed`")
    if len({rows.shape[1] for _, rows in parts}) > 1:
        raise DataError(f"{uri} has embeddings of several widths; give the output of one `raycl embed`")
    ids = np.concatenate([some for some, _ in parts])
    rows, stop = np.empty((len(ids), parts[0][1].shape[1]), np.float32), len(ids)
    while parts:  # each is freed once it is copied
        _, some = parts.pop()
        rows[stop - len(some) : stop] = some
        stop -= len(some)
    return _embedded(Place(absolute(run)), ids, rows, 0)


def _embedded(run: Place, sample_id: np.ndarray, rows: np.ndarray, step: int) -> SavedBank:
    capacity, dim = rows.shape
    spec = BankSpec(name=run.name, kind="memory_bank", dim=dim, capacity=capacity, output=run.uri)
    spec = replace(spec, dtype="float16" if rows.dtype == np.float16 else "float32")
    return SavedBank(spec, Negatives(rows, sample_id, np.full(capacity, step)), "embeddings")
