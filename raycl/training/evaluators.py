"""Periodic evaluation during training: weighted kNN on labels, or recall on held-out pairs."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from raycl.config import RunConfig
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.data.split import Holdout
from raycl.distributed import all_sum, gather_detached, num_workers, rank
from raycl.evaluation.embed import embed
from raycl.evaluation.knn import knn_predict, nearest
from raycl.models.towers import Tower, Towers, TwoTowers
from raycl.training.views import Draft, Transform

BATCH_SIZE = 256


class Evaluator(Protocol):
    """Periodic evaluation of the towers; collective."""

    def measure(self, towers: Towers, device: torch.device) -> dict[str, float]:
        """Return the metrics to log, the most important first."""
        ...


@final
@dataclass(frozen=True, kw_only=True)
class KnnEvaluator:
    """Weighted kNN: training rows (``bank``) vote on the labels of held-out rows (``test``).

    ``prepare`` converts rows to encoder inputs without augmentation. The encoder computes in
    ``precision``; neighbors are found in float32.
    """

    bank: InMemoryDataset
    test: InMemoryDataset
    prepare: Callable[[Batch], Draft]
    k: int = 200
    temperature: float = 0.07
    precision: str = "float32"

    def measure(self, towers: Towers, device: torch.device) -> dict[str, float]:
        """Return the kNN top-1 accuracy; every worker encodes and classifies its own share."""
        encoder = towers.towers[0].encoder
        bank, bank_label = self._encode(encoder, self.bank, device)
        test, test_label = self._encode(encoder, self.test, device)
        bank, bank_label = gather_detached(bank), gather_detached(bank_label)
        predicted = knn_predict(test, bank, bank_label, k=self.k, temperature=self.temperature)
        counts = torch.tensor([(predicted == test_label).sum(), len(test_label)], device=device)
        num_right, num_evaluated = all_sum(counts).tolist()
        return {"knn_top1": num_right / num_evaluated}

    def _encode(
        self, encoder: nn.Module, rows: InMemoryDataset, device: torch.device
    ) -> tuple[Tensor, Tensor]:
        share = _own_share(len(rows))
        inputs = (self.prepare(rows.take(part)).on(device) for part in _batches(share))
        representation = embed(encoder, inputs, precision=self.precision)
        return representation.to(device), torch.from_numpy(rows.label[share]).to(device)


@final
@dataclass(frozen=True, kw_only=True)
class RetrievalEvaluator:
    """Retrieval: each query of ``test`` is compared with the keys of ``test`` and ``bank``."""

    bank: InMemoryDataset
    test: InMemoryDataset
    drawing: Transform
    precision: str = "float32"

    def measure(self, towers: Towers, device: torch.device) -> dict[str, float]:
        """Return the fraction of queries whose own key, or an equal one, is among the nearest 1 and 10 keys."""
        assert isinstance(towers, TwoTowers), "pairs have two towers"
        test = _own_share(len(self.test))
        query = self._embed(towers.query, self.test, test, 0, device)
        wanted = self._key_ids(self.test, test).to(device)
        parts = [(self.test, test), (self.bank, _own_share(len(self.bank)))]
        key = torch.cat([self._embed(towers.key_tower, rows, share, 1, device) for rows, share in parts])
        key_id = torch.cat([self._key_ids(rows, share) for rows, share in parts])
        keys, ids = gather_detached(key.to(device)), gather_detached(key_id.to(device))
        # Keep each document once: duplicates would fill the first ranks.
        order = ids.argsort(stable=True)
        is_new = torch.ones_like(ids, dtype=torch.bool)
        is_new[1:] = ids[order][1:] != ids[order][:-1]
        chosen = order[is_new]
        _, found = nearest(query.to(device), keys[chosen], k=10)
        is_right = ids[chosen][found] == wanted[:, None]
        counts = torch.stack([is_right[:, :1].sum(), is_right.sum(), torch.tensor(len(test), device=device)])
        at_1, at_10, num_evaluated = all_sum(counts).tolist()
        return {"recall_at_10": at_10 / num_evaluated, "recall_at_1": at_1 / num_evaluated}

    def _embed(
        self, tower: Tower, rows: InMemoryDataset, share: NDArray[np.int64], number: int, device: torch.device
    ) -> Tensor:
        draw = self.drawing.plain if number == 0 else self.drawing.plain_key
        inputs = (draw(rows.take(part)).on(device) for part in _batches(share))
        return embed(tower, inputs, precision=self.precision)

    def _key_ids(self, rows: InMemoryDataset, share: NDArray[np.int64]) -> Tensor:
        parts = [self.drawing.plain_key_id(rows.take(part)) for part in _batches(share)]
        return torch.cat([torch.empty(0, dtype=torch.int64), *parts])


def build_evaluator(
    config: RunConfig, rows: InMemoryDataset, holdout: Holdout, drawing: Transform, *, wanted: bool
) -> Evaluator | None:
    """Return the evaluator of the run; None unless it is ``wanted`` and each worker has a row."""
    if not wanted:
        return None
    bank, test = rows.where(holdout.is_bank), rows.where(holdout.is_test)
    if not config.has_two_towers:
        bank, test = bank.labeled(), test.labeled()
    if min(len(bank), len(test)) < num_workers():
        return None
    if config.has_two_towers:
        return RetrievalEvaluator(bank=bank, test=test, drawing=drawing, precision=config.tower_precision)
    return KnnEvaluator(
        bank=bank,
        test=test,
        prepare=drawing.plain,
        k=config.evaluation.k,
        temperature=config.evaluation.temperature,
        precision=config.tower_precision,
    )


def _own_share(num_rows: int) -> NDArray[np.int64]:
    """Return this worker's rows, equally many on each worker, as required by the gather."""
    return np.arange(num_rows // num_workers()) * num_workers() + rank()


def _batches(positions: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    for start in range(0, len(positions), BATCH_SIZE):
        yield positions[start : start + BATCH_SIZE]
