"""Mined negatives of a batch: documents near its queries, drawn from the newest table of the miner."""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray

from raycl.augment.rng import MINED, uniforms
from raycl.config.schema import MinedConfig
from raycl.data.in_memory import Batch
from raycl.distributed import rank
from raycl.training.corpus import Corpus

_NONE = -1


@final
@dataclass(frozen=True, kw_only=True)
class MinedTable:
    """The hard negatives of each pair of a corpus, nearest first, both int32 [num_pairs, num_candidates].

    Attributes:
        document: the number of the document, -1 where there are fewer.
        step: the step of the weights that embedded it.
        query_step: the step of the weights that embedded the queries.
        version: a name that no other table has.
    """

    document: NDArray[np.int32]
    step: NDArray[np.int32]
    query_step: int
    version: str = ""


class Drawn(NamedTuple):
    """The negatives of a batch, ``num`` for each query in order, both int64 [num_rows * num]."""

    document: NDArray[np.int64]
    step: NDArray[np.int64]  # -1 for a random document


_NOTHING = Drawn(np.empty(0, np.int64), np.empty(0, np.int64))


@final
class MinedNegatives:
    """Draw ``num`` mined negatives of each query of a batch, a function of seed, epoch, sample and table.

    They come from the candidates in the table without replacement, some at random from all documents that do not
    match the query: the configured fraction, and all where the table has no more, as before the first one. The corpus
    of a stream grows: it comes with a table, and before the first one it has no negatives. ``load_rows`` makes it
    of the stream's rows.

    Attributes:
        corpus: the corpus of the table; None before the first one of a stream.
        table: the table in use, if any.
        rows: the rows of a stream that are the corpus, as ``load_rows`` reads them; only the first worker has them.
        passed: rows of a stream that this worker read and has not sent to the miner.
    """

    def __init__(
        self,
        corpus: Corpus | None,
        settings: MinedConfig,
        *,
        seed: int,
        load_rows: Callable[[bytes], Corpus] | None = None,
    ) -> None:
        self.corpus, self._settings, self._seed = corpus, settings, seed
        self._load_rows = load_rows
        self.passed: deque[pa.Table] = deque()  # appended by the thread that reads
        self.table: MinedTable | None = None
        self.rows: bytes | None = None
        self._last = _NOTHING

    @property
    def grows(self) -> bool:
        """Whether the corpus is a stream's."""
        return self._load_rows is not None

    @property
    def num_candidates(self) -> int:
        """The number of candidates of each pair in a table."""
        return self._settings.candidates

    def use(self, table: MinedTable | None, corpus: Corpus | None = None) -> None:
        """Draw from this table from the next batch on, and from this corpus if it is another one."""
        self.table = table
        self.corpus = corpus or self.corpus

    def draw(self, batch: Batch, number: NDArray[np.int64] | None = None) -> Drawn:
        """Return the negatives of a batch of training rows.

        ``number`` [num_rows] is the caption or the query that each row shows, where it has several texts.
        """
        self._last = _NOTHING if self.corpus is None else self._draw(self.corpus, batch, number)
        return self._last

    def metrics(self, *, step: int) -> dict[str, float]:
        """Return the fraction of random documents in the last batch drawn, and the ages of the others at this step."""
        steps = self._last.step
        mined = steps[steps != _NONE]
        found = {"mined_random_fraction": 1.0 - len(mined) / max(1, len(steps))}
        if len(mined):
            found["negatives_age_mean"] = step - float(mined.mean())
            found["negatives_age_max"] = float(step - mined.min())
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the table in use; empty before the first one."""
        if self.table is None:
            return {}
        arrays = {name: torch.tensor(getattr(self.table, name)) for name in ("document", "step")}
        if self.rows is not None:
            arrays["rows"] = torch.frombuffer(bytearray(self.rows), dtype=torch.uint8)
        return {**arrays, "query_step": self.table.query_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        arrays = {name: state[name].numpy() for name in ("document", "step") if state}
        self.use(MinedTable(**arrays, query_step=state["query_step"]) if state else None)
        if self._load_rows is not None:
            rows = state["rows"].numpy().tobytes() if state else None
            self.corpus = None if rows is None else self._load_rows(rows)
            self.rows = rows if rank() == 0 else None

    def _draw(self, corpus: Corpus, batch: Batch, number: NDArray[np.int64] | None) -> Drawn:
        pair, num = corpus.pairs_of(batch.sample_id, number), self._settings.num
        document, step = self._candidates(pair, batch)
        drawn = uniforms(batch.sample_id, seed=self._seed + MINED, epoch=batch.epoch, view=1, num=3 * num)
        is_random, coarse, fine = drawn.double().numpy().reshape(len(pair), 3, num).transpose(1, 0, 2)
        unknown = (document == _NONE) | (is_random < self._settings.random_fraction)
        others = _others(corpus, pair, coarse + fine * 2.0**-24)
        document, step = np.where(unknown, others, document), np.where(unknown, _NONE, step)
        return Drawn(document.ravel(), step.ravel())

    def _candidates(
        self, pair: NDArray[np.int64], batch: Batch
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw documents of the table and their steps, both int64 [num_rows, num], -1 where it has none left."""
        size, num = self._settings.candidates, self._settings.num
        if self.table is None:
            return np.full((len(pair), num), _NONE), np.full((len(pair), num), _NONE)
        is_known = (pair != _NONE)[:, None]
        document = np.where(is_known, self.table.document[pair], _NONE).astype(np.int64)
        order = uniforms(batch.sample_id, seed=self._seed + MINED, epoch=batch.epoch, view=0, num=size)
        last = torch.from_numpy(document == _NONE)
        chosen = order.masked_fill(last, 2.0).argsort(dim=1, stable=True).numpy()[:, :num]
        step = self.table.step[pair].astype(np.int64)
        return np.take_along_axis(document, chosen, 1), np.take_along_axis(step, chosen, 1)


def _others(corpus: Corpus, pairs: NDArray[np.int64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return documents that do not match the query of the row's pair, by numbers in [0, 1) of the same shape.

    The documents that match an unknown pair, -1, are unknown too. A query that all documents match gets its own
    document, which the loss masks as its key.
    """
    num_documents = len(corpus.document)
    found = np.empty(uniform.shape, np.int64)
    for row, pair in enumerate(pairs):
        query, own = corpus.positive[pair]
        matches = np.empty(0, np.int64) if pair == _NONE else corpus.matches_of(query)
        if len(matches) == num_documents:
            found[row] = own
            continue
        place = (uniform[row] * (num_documents - len(matches))).astype(np.int64)
        # The documents that do not match, in order: match i has ``match - i`` of them before it.
        before = matches - np.arange(len(matches))
        found[row] = place + np.searchsorted(before, place, side="right")
    return found.clip(max=num_documents - 1)
