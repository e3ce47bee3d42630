"""Every loss over real workers, with a gather or a ring, equals the plain formula on the whole batch."""

from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from raycl.distributed import collectives
from raycl.loss_specs import LOSSES, LossSettings
from raycl.losses.example_ids import ExampleIds, IdExchange
from raycl.losses.logq import Frequencies
from raycl.losses.objective import StoreBatch
from tests.embeddings import make_rows, make_views, worker_spans
from tests.gradients import assert_close, leaves
from tests.plain_losses import (
    WAYS,
    plain_bidirectional,
    plain_dcl,
    plain_hinge,
    plain_info_nce,
    plain_nt_xent,
    plain_siglip,
    plain_supcon,
)
from tests.tiles import tiny_tiles_in
from tests.workers.processes import run_workers

BATCH, DIM = 24, 5
# The number of explicit negatives per worker, which varies between batches of clicks.
NUM_NEGATIVES = {1: (16,), 2: (5, 11), 3: (0, 9, 7), 4: (3, 0, 9, 4)}
FREQUENCIES = Frequencies(torch.arange(200), -5 * torch.rand(200, generator=torch.Generator().manual_seed(4)))


@dataclass(frozen=True)
class Case:
    """A loss with its settings, and whether it supports pairs and negatives."""

    loss: str
    settings: dict[str, Any] = field(default_factory=dict)
    pairs: bool = False
    negatives: bool = False


CASES = {
    "nt_xent": Case("nt_xent"),
    "supcon": Case("supcon"),
    "dcl": Case("dcl"),
    "dclw": Case("dclw"),
    "info_nce": Case("info_nce", negatives=True),
    "info_nce of pairs": Case("info_nce", pairs=True, negatives=True),
    "info_nce, negatives alone": Case("info_nce", {"in_batch": False}, pairs=True, negatives=True),
    "clip": Case("clip", pairs=True, negatives=True),
    "clip, logq": Case("clip", {"log_frequency": FREQUENCIES}, pairs=True, negatives=True),
    "siglip": Case("siglip", pairs=True),
    "hinge, negatives alone": Case("hinge", {"in_batch": False}, pairs=True, negatives=True),
} | {
    f"hinge {number}": Case(
        "hinge",
        {"hardest": ways["hardest"], "learns_keys": ways["bidirectional"]},
        pairs=True,
        negatives=True,
    )
    for number, ways in enumerate(WAYS)
}
BY_RING = ("nt_xent", "supcon", "dcl", "dclw", "info_nce", "info_nce of pairs", "clip", "siglip")


def make_inputs() -> list[Tensor]:
    """Return queries, keys, temperature, bias, explicit negatives and the rows of a queue."""
    rows = *make_views(BATCH, DIM, noise=1.0), torch.tensor(0.2), torch.tensor(-2.0)
    return leaves(*rows, make_rows(16, DIM), make_rows(40, DIM, seed=7), dtype=torch.float64)


def make_ids(case: Case) -> dict[str, Tensor]:
    query_id, key_id, negative_id = torch.arange(BATCH), torch.arange(BATCH), torch.arange(100, 116)
    # The first and the last pair, on different workers, share a query; the second and the last share a key.
    # So the last key is a positive of the first query, and it is also among the explicit negatives.
    query_id[-1], key_id[-1] = 0, 1
    negative_id[[0, 9]], negative_id[15] = 1, 2
    ids = {"query": query_id, "key": key_id if case.pairs else query_id, "negative": negative_id}
    return ids | {"label": torch.arange(BATCH) % 5, "queue": torch.arange(40) % 31}


def on_a_worker(rank: int, num_workers: int, name: str, by_ring: bool) -> list[Tensor]:
    case, inputs = CASES[name], make_inputs()
    ids, own = make_ids(case), worker_spans(BATCH, num_workers)[rank]
    sizes = NUM_NEGATIVES[num_workers]
    explicit = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    local = leaves(inputs[0][own], inputs[1][own], *inputs[2:4], inputs[4][explicit], inputs[5])
    names = ExampleIds(
        query=ids["query"][own, None],
        key=ids["key"][own, None],
        negative=ids["negative"][explicit, None] if case.negatives else None,
        label=ids["label"][own],
    )
    batch, stored = IdExchange(torch.device("cpu")).start(names)(), StoreBatch()
    if case.negatives:
        stored = StoreBatch(negatives=local[5], negative_id=ids["queue"]).for_batch(batch, local[4])
    settings = {"pairs": case.pairs, "margin": 0.3, **case.settings}
    objective = LOSSES[case.loss].build(LossSettings(temperature=local[2], bias=local[3], **settings))
    limit = 0 if by_ring else 2**60
    with tiny_tiles_in("softmax", "siglip", "hinge"), patch.object(collectives, "MAX_GATHERED_BYTES", limit):
        return filled(objective(local[0], local[1], stored, batch), local)


def filled(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the loss and its gradients, with zeros for unused inputs."""
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    zeros = map(torch.zeros_like, inputs)
    return [
        loss.detach(),
        *(zero if each is None else each for each, zero in zip(gradients, zeros, strict=True)),
    ]


def whole_batch(case: Case) -> list[Tensor]:
    """Return the plain loss of the whole batch, and its gradients."""
    inputs, ids = make_inputs(), make_ids(case)
    query, key, temperature, bias, explicit, queue = inputs
    others, other_id = torch.cat([explicit, queue]), torch.cat([ids["negative"], ids["queue"]])
    pairs = ids["query"], ids["key"]
    in_batch = case.settings.get("in_batch", True)
    if case.loss == "nt_xent":
        loss = plain_nt_xent(query, key, temperature, ids=(pairs[0], pairs[0]))
    elif case.loss in ("dcl", "dclw"):
        sigma = 0.5 if case.loss == "dclw" else None
        loss = plain_dcl(query, key, temperature, sigma=sigma, ids=(pairs[0], pairs[0]))
    elif case.loss == "supcon":
        loss = plain_supcon(torch.cat([query, key]), ids["label"].repeat(2), temperature)
    elif case.loss == "siglip":
        loss = plain_siglip(query, key, temperature, bias, pair_ids=pairs)
    elif case.loss == "info_nce":
        shared: dict[str, Any] = {"pair_ids": pairs} if case.pairs else {"ids": (pairs[0], pairs[0])}
        loss = plain_info_nce(
            query, key, temperature, others, in_batch=in_batch, negative_id=other_id, **shared
        )
    elif case.loss == "hinge":
        loss = plain_hinge(
            query,
            key,
            others,
            margin=0.3,
            hardest=case.settings.get("hardest", False),
            bidirectional=in_batch and case.settings["learns_keys"],
            in_batch=in_batch,
            pair_ids=pairs,
            negative_id=other_id,
        )
    else:
        frequencies = {}
        if "log_frequency" in case.settings:
            frequencies = {
                "key_log_frequency": FREQUENCIES(pairs[1]),
                "negative_log_frequency": FREQUENCIES(other_id),
            }
        loss = plain_bidirectional(
            query,
            key,
            temperature,
            others,
            query_id=pairs[0],
            key_id=pairs[1],
            negative_id=other_id,
            **frequencies,
        )
    return filled(loss, inputs)


@pytest.mark.parametrize("num_workers", (1, 2, 3, 4))
@pytest.mark.parametrize(
    ("name", "by_ring"), [*((name, False) for name in CASES), *((name, True) for name in BY_RING)]
)
def test_workers_give_the_loss_and_gradients_of_the_whole_batch(
    name: str, by_ring: bool, num_workers: int
) -> None:
    expected = whole_batch(CASES[name])
    assert expected[1].norm() > 1e-3
    loss, query, key, temperature, bias, explicit, queue = zip(
        *run_workers(on_a_worker, num_workers, name, by_ring), strict=True
    )
    # Like DDP: the mean of the workers' losses, and of the gradients of their shared parameters.
    of_rows = [torch.cat(each) / num_workers for each in (query, key, explicit)]
    shared = [torch.stack(each).mean(0) for each in (loss, temperature, bias, queue)]
    ours = [shared[0], *of_rows[:2], *shared[1:3], of_rows[2], shared[3]]
    assert_close(ours, expected, 1e-9, 1e-12)
