"""Mined negatives of a batch: documents near its queries, drawn from the newest table of the miner."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import numpy as np
import torch
from numpy.typing import NDArray

from raycl.augment.rng import uniforms
from raycl.config.schema import MinedConfig
from raycl.data.in_memory import Batch
from raycl.data.texts import Tokens
from raycl.training.corpus import Corpus

_DRAWS = 7 << 40  # a separate sequence of draws, after the one that chooses texts
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


@final
class MinedNegatives:
    """Draw ``num`` mined negatives of each query of a batch, a function of seed, epoch, sample and table.

    They come from the candidates in the table without replacement, some at random from all documents that do not
    match the query: the configured fraction, and all where the table has no more, as before the first one.
    """

    def __init__(self, corpus: Corpus, settings: MinedConfig, *, seed: int) -> None:
        self.corpus, self._settings, self._seed = corpus, settings, seed
        self.table: MinedTable | None = None
        self._last = Drawn(np.empty(0, np.int64), np.empty(0, np.int64))
        self._batch: Batch | None = None  # of the last draw

    @property
    def num_candidates(self) -> int:
        """The number of candidates of each pair in a table."""
        return self._settings.candidates

    def use(self, table: MinedTable | None) -> None:
        """Draw from this table from the next batch on."""
        self.table, self._batch = table, None

    def draw(self, batch: Batch) -> Drawn:
        """Return the negatives of a batch of training rows."""
        if batch is not self._batch:
            self._batch, self._last = batch, self._draw(batch)
        return self._last

    def tokens(self, drawn: Drawn) -> Tokens:
        """Return the texts of these documents."""
        return self.corpus.document.take(drawn.document)

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
        return {**arrays, "query_step": self.table.query_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state_dict`` returned."""
        arrays = {name: state[name].numpy() for name in ("document", "step") if state}
        self.use(MinedTable(**arrays, query_step=state["query_step"]) if state else None)

    def _draw(self, batch: Batch) -> Drawn:
        pair, num = self.corpus.pairs_of(batch.sample_id), self._settings.num
        document, step = self._candidates(pair, batch)
        drawn = uniforms(batch.sample_id, seed=self._seed + _DRAWS, epoch=batch.epoch, view=1, num=3 * num)
        is_random, coarse, fine = drawn.double().numpy().reshape(len(pair), 3, num).transpose(1, 0, 2)
        unknown = (document == _NONE) | (is_random < self._settings.random_fraction)
        queries = self.corpus.positive[pair, 0]
        others = self._others(queries, coarse + fine * 2.0**-24)
        document, step = np.where(unknown, others, document), np.where(unknown, _NONE, step)
        return Drawn(document.ravel(), step.ravel())

    def _candidates(
        self, pair: NDArray[np.int64], batch: Batch
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw documents of the table and their steps, both int64 [num_rows, num], -1 where it has none left."""
        size, num = self._settings.candidates, self._settings.num
        if self.table is None:
            return np.full((len(pair), num), _NONE), np.full((len(pair), num), _NONE)
        document = self.table.document[pair].astype(np.int64)
        order = uniforms(batch.sample_id, seed=self._seed + _DRAWS, epoch=batch.epoch, view=0, num=size)
        last = torch.from_numpy(document == _NONE)
        chosen = order.masked_fill(last, 2.0).argsort(dim=1, stable=True).numpy()[:, :num]
        step = self.table.step[pair].astype(np.int64)
        return np.take_along_axis(document, chosen, 1), np.take_along_axis(step, chosen, 1)

    def _others(self, queries: NDArray[np.int64], uniform: NDArray[np.float64]) -> NDArray[np.int64]:
        """Return documents that do not match the query of the row, by numbers in [0, 1) of the same shape."""
        num_documents = len(self.corpus.document)
        found = np.empty(uniform.shape, np.int64)
        for row, query in enumerate(queries):
            matches = self.corpus.matches_of(query)
            place = (uniform[row] * (num_documents - len(matches))).astype(np.int64)
            # The documents that do not match, in order: match i has ``match - i`` of them before it.
            before = matches - np.arange(len(matches))
            found[row] = place + np.searchsorted(before, place, side="right")
        return found.clip(max=num_documents - 1)
