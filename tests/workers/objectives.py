"""Every objective on real workers, and its plain formula on the whole batch: one entry in ``CASES`` for each.

``test_objectives.py`` compares them in float64, and ``benchmarks/objectives.py`` in float32 for
``docs/objectives.md``.
"""

import contextlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.distributed import RingTransfer, collectives
from raycl.gradient_cache import embed_in_chunks
from raycl.loss_specs import LOSSES
from raycl.losses import NormalizingConstant
from raycl.losses.example_ids import ExampleIds, IdExchange, mean_one
from raycl.losses.guide import Guide
from raycl.losses.logq import Frequencies
from raycl.losses.objective import Objective, Partition, StoreBatch
from tests.embeddings import make_rows, make_views, worker_spans
from tests.plain_losses import (
    are_nearer,
    plain_bidirectional,
    plain_dcl,
    plain_distillation,
    plain_gcl,
    plain_gcl_of_pairs,
    plain_hinge,
    plain_info_nce,
    plain_nce,
    plain_nnclr,
    plain_nt_xent,
    plain_poly_view,
    plain_siglip,
    plain_supcon,
)
from tests.tiles import tiny_tiles_in
from tests.workers.processes import run_workers

# The number of explicit negatives per worker, which varies between batches of clicks.
NUM_NEGATIVES = {1: (16,), 2: (5, 11), 3: (0, 9, 7), 4: (3, 0, 9, 4)}
NUM_SLOTS, MARGIN, MOMENTUM = 50_000, 0.3, 0.4
FREQUENCIES = Frequencies(
    torch.arange(10_000), -5 * torch.rand(10_000, generator=torch.Generator().manual_seed(4))
)
GATHERS, ALONE = "gathers at any size", "gathers no embeddings"  # losses without a ring
INPUTS = ("query", "key", "temperature", "bias", "explicit negatives", "queue")


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The sizes and circumstances of a comparison; the defaults are the most difficult small one.

    ``chunks`` above 1 puts a linear tower of unit rows before each side, whose weights then replace the rows.
    """

    scale: int = 1
    dim: int = 5
    dtype: torch.dtype = torch.float64
    temperature: float = 0.2
    num_workers: int = 1
    by_ring: bool = False
    chunks: int = 1
    queue: bool = True
    explicit: bool = True
    repeated_ids: bool = True
    weights: bool = False
    tiny_tiles: bool = True

    @property
    def batch(self) -> int:
        """The number of pairs of all workers."""
        return 24 * self.scale

    @property
    def num_negatives(self) -> tuple[int, ...]:
        """The number of explicit negatives of each worker."""
        return tuple(self.scale * number for number in NUM_NEGATIVES[self.num_workers])


@dataclass(frozen=True, kw_only=True)
class Batch:
    """The rows [batch, dim], scalars and ids of the whole batch; ``others`` are all rows of explicit negatives and stores.

    ``guide`` are another encoder's queries, keys and explicit negatives.
    """

    query: Tensor
    key: Tensor
    temperature: Tensor
    bias: Tensor
    others: Tensor
    query_id: Tensor
    key_id: Tensor
    other_id: Tensor
    label: Tensor
    weight: Tensor | None
    guide: tuple[Tensor, Tensor, Tensor]

    @property
    def pair_ids(self) -> tuple[Tensor, Tensor]:
        """The ids of queries and keys."""
        return self.query_id, self.key_id


@dataclass(frozen=True, kw_only=True)
class Case:
    """A loss of the product with its settings, its plain formula, and the run that uses it.

    ``pairs`` means that queries and keys have ids of their own, ``negatives`` that it uses further negatives,
    ``own_slot`` that the positive is a slot of a memory bank, ``third_view`` that a sample has three views,
    ``partition`` is the number of its stored partition functions. ``no_ring`` says why large batches use no ring.
    ``run`` are settings of the recipe, and ``guide`` the margin of a guide.
    """

    loss: str
    plain: Callable[[Batch], Tensor]
    settings: Mapping[str, Any] = field(default_factory=dict)
    pairs: bool = False
    negatives: bool = False
    own_slot: bool = False
    third_view: bool = False
    partition: int = 0
    no_ring: str = ""
    recipe: str = "simclr"
    run: Mapping[str, Any] = field(default_factory=dict)
    guide: Mapping[str, Any] | None = None

    @property
    def in_batch(self) -> bool:
        """Whether the other rows of the batch are negatives."""
        return self.settings.get("in_batch", not self.own_slot)


def of_views(plain: Callable[..., Tensor], **settings: Any) -> Callable[[Batch], Tensor]:
    """Return a plain formula of two views of each sample."""
    return lambda batch: plain(
        batch.query,
        batch.key,
        batch.temperature,
        ids=(batch.query_id, batch.query_id),
        weight=batch.weight,
        **settings,
    )


def _info_nce(batch: Batch, *, in_batch: bool = True, pairs: bool = True) -> Tensor:
    ids: dict[str, Any] = {"pair_ids": batch.pair_ids} if pairs else {"ids": (batch.query_id, batch.query_id)}
    rows = batch.query, batch.key, batch.temperature, batch.others
    return plain_info_nce(*rows, in_batch=in_batch, negative_id=batch.other_id, weight=batch.weight, **ids)


def _clip(batch: Batch, **settings: Any) -> Tensor:
    return plain_bidirectional(
        batch.query,
        batch.key,
        batch.temperature,
        batch.others,
        query_id=batch.query_id,
        key_id=batch.key_id,
        negative_id=batch.other_id,
        weight=batch.weight,
        **settings,
    )


def _clip_logq(batch: Batch, *, refined: bool = False) -> Tensor:
    return _clip(
        batch,
        key_log_frequency=FREQUENCIES(batch.key_id),
        negative_log_frequency=FREQUENCIES(batch.other_id),
        refines_logq=refined,
    )


def _clip_guided(batch: Batch, **margin: Any) -> Tensor:
    query, key, negatives = batch.guide
    to_keys = are_nearer(query, key, torch.cat([key, negatives[: len(batch.others)]]), **margin)
    return _clip(batch, nearer=(to_keys, are_nearer(key, query, query, **margin)))


def _info_nce_guided(batch: Batch, **margin: Any) -> Tensor:
    query, key, negatives = batch.guide
    candidates = torch.cat([key, negatives[: len(batch.others)]])
    rows = batch.query, batch.key, batch.temperature, batch.others
    ids: dict[str, Any] = {"negative_id": batch.other_id, "pair_ids": batch.pair_ids}
    nearer = are_nearer(query, key, candidates, **margin)
    return plain_info_nce(*rows, **ids, nearer=nearer, weight=batch.weight)


def _guided_case(loss: str, plain: Callable[..., Tensor], *, margin: float, strategy: str) -> Case:
    settings: dict[str, Any] = {"margin": margin, "relative": strategy == "relative"}
    folders = {f"negatives.guide.{side}": f"guide/{side}" for side in ("query", "document")}
    return Case(
        loss=loss,
        plain=lambda batch: plain(batch, **settings),
        **OF_PAIRS,
        guide=settings,
        run=folders | {"negatives.guide.margin": margin, "negatives.guide.margin_strategy": strategy},
    )


def _info_nce_guided_views(batch: Batch, **margin: Any) -> Tensor:
    """Mask the keys of other samples that the guide finds near; both views of a sample have one embedding."""
    samples, ids = batch.guide[0], (batch.query_id, batch.query_id)
    nearer = are_nearer(samples, samples, samples, **margin)
    rows = batch.query, batch.key, batch.temperature
    return plain_info_nce(*rows, ids=ids, nearer=nearer, weight=batch.weight)


def _distillation(batch: Batch, *, of_samples: bool, teacher_keys: bool) -> Tensor:
    query, key, _ = batch.guide
    rows = batch.query, batch.key, batch.temperature, (query, query if of_samples else key)
    settings: dict[str, Any] = {"teacher_temperature": 0.1, "teacher_keys": teacher_keys}
    return plain_distillation(*rows, **settings, weight=batch.weight)


def _distillation_case(*, of_samples: bool, teacher_keys: bool = False) -> Case:
    sides = ("query",) if of_samples else ("query", "document")
    return Case(
        loss="distillation",
        plain=partial(_distillation, of_samples=of_samples, teacher_keys=teacher_keys),
        settings={"teacher_temperature": 0.1, "teacher_keys": teacher_keys},
        pairs=not of_samples,
        no_ring=GATHERS,
        recipe="simclr" if of_samples else "two_tower",
        guide={},
        run={f"negatives.guide.{side}": f"guide/{side}" for side in sides}
        | ({"stages.0.teacher_keys": True} if teacher_keys else {}),
    )


def _siglip(batch: Batch) -> Tensor:
    rows = batch.query, batch.key, batch.temperature, batch.bias
    return plain_siglip(*rows, pair_ids=batch.pair_ids, weight=batch.weight)


def _supcon(batch: Batch) -> Tensor:
    weight = None if batch.weight is None else batch.weight.repeat(2)
    rows = torch.cat([batch.query, batch.key])
    return plain_supcon(rows, batch.label.repeat(2), batch.temperature, weight=weight)


def third_view(query: Tensor, key: Tensor) -> Tensor:
    """Return one more view of each sample, which depends on both others."""
    return F.normalize(2 * query - key, dim=1)


def other_views(case: Case, query: Tensor, key: Tensor) -> Tensor:
    """Return the rows of all views but the query."""
    return torch.cat([key, third_view(query, key)]) if case.third_view else key


def _poly_view(batch: Batch, *, mean: str) -> Tensor:
    views = batch.query, batch.key, third_view(batch.query, batch.key)
    return plain_poly_view(views, batch.temperature, mean=mean, ids=batch.query_id, weight=batch.weight)


def _poly_view_case(mean: str) -> Case:
    return Case(
        loss="poly_view",
        plain=lambda batch: _poly_view(batch, mean=mean),
        settings={"view_mean": mean, "num_views": 3},
        third_view=True,
        run={"augment.views": [{"count": 3}], "stages.0.view_mean": mean},
    )


def _nnclr(batch: Batch) -> Tensor:
    rows = batch.query, batch.key, batch.others
    return plain_nnclr(*rows, batch.temperature, ids=batch.query_id, weight=batch.weight)


def _nce(batch: Batch) -> Tensor:
    """Estimate the normalizing constant from the batch, as the first step does."""
    noise, masked = batch.others.detach(), batch.query_id[:, None] == batch.other_id
    logits = (batch.query @ noise.T / batch.temperature).detach().masked_fill(masked, -torch.inf)
    mean = logits.flatten().logsumexp(0).item() - math.log((~masked).sum().item())
    rows = batch.query, batch.key.detach(), noise, batch.temperature
    return plain_nce(*rows, NUM_SLOTS, math.log(NUM_SLOTS) + mean, masked)


def stored_partitions(batch: int, num_sides: int) -> Tensor:
    """Return the partition functions of each sample of the batch; 0, for none, for every fourth sample."""
    generator = torch.Generator().manual_seed(8)
    partitions = torch.randn(batch, num_sides, generator=generator, dtype=torch.float64).exp()
    return partitions * (torch.arange(batch) % 4 > 0)[:, None]


def _gcl(batch: Batch) -> Tensor:
    rows, ids = (batch.query, batch.key, batch.temperature), (batch.query_id, batch.query_id)
    stored = stored_partitions(len(batch.query), 1)[:, 0]
    settings: dict[str, Any] = {"momentum": MOMENTUM, "num_samples": NUM_SLOTS, "weight": batch.weight}
    return plain_gcl(*rows, stored=stored, ids=ids, **settings)[0]


def _gcl_of_pairs(batch: Batch) -> Tensor:
    rows, stored = (batch.query, batch.key, batch.temperature), stored_partitions(len(batch.query), 2)
    settings: dict[str, Any] = {"momentum": MOMENTUM, "num_samples": NUM_SLOTS, "weight": batch.weight}
    return plain_gcl_of_pairs(*rows, stored=stored, ids=batch.pair_ids, **settings)[0]


def _hinge(batch: Batch, **settings: bool) -> Tensor:
    return plain_hinge(
        batch.query,
        batch.key,
        batch.others,
        margin=MARGIN,
        pair_ids=batch.pair_ids,
        negative_id=batch.other_id,
        **settings,
    )


def _hinge_case(*, hardest: bool, bidirectional: bool) -> Case:
    return Case(
        loss="hinge",
        plain=lambda batch: _hinge(batch, hardest=hardest, bidirectional=bidirectional),
        settings={"hardest": hardest, "learns_keys": bidirectional},
        no_ring=GATHERS,
        negatives=True,
        pairs=bidirectional,
        recipe="two_tower" if bidirectional else "simclr",
        run={"stages.0.hardest_negative": hardest, "key": "tower" if bidirectional else "momentum_encoder"},
    )


OF_PAIRS: dict[str, Any] = {"pairs": True, "negatives": True, "recipe": "two_tower"}
QUEUE_ALONE: dict[str, Any] = {"negatives.in_batch": False, "negatives.store": "queue"}
CASES = {
    "nt_xent": Case(loss="nt_xent", plain=of_views(plain_nt_xent)),
    "info_nce": Case(loss="info_nce", plain=lambda batch: _info_nce(batch, pairs=False), negatives=True),
    "info_nce of pairs": Case(loss="info_nce", plain=_info_nce, **OF_PAIRS),
    "info_nce, queue alone": Case(
        loss="info_nce",
        plain=lambda batch: _info_nce(batch, in_batch=False),
        settings={"in_batch": False},
        no_ring=ALONE,
        **OF_PAIRS,
        run=QUEUE_ALONE,
    ),
    "clip": Case(loss="clip", plain=_clip, **OF_PAIRS),
    "clip, logq": Case(
        loss="clip",
        plain=_clip_logq,
        settings={"log_frequency": FREQUENCIES},
        **OF_PAIRS,
        run={"stages.0.logq_correction": "simple"},
    ),
    "clip, refined logq": Case(
        loss="clip",
        plain=lambda batch: _clip_logq(batch, refined=True),
        settings={"log_frequency": FREQUENCIES, "refines_logq": True},
        **OF_PAIRS,
        run={"stages.0.logq_correction": "refined"},
    ),
    "clip, guide": _guided_case("clip", _clip_guided, margin=0.05, strategy="absolute"),
    "info_nce, guide": Case(
        loss="info_nce",
        plain=lambda batch: _info_nce_guided_views(batch, margin=0.7),
        guide={"margin": 0.7},
        run={"negatives.guide.query": "guide", "negatives.guide.margin": 0.7},
    ),
    "info_nce of pairs, guide": _guided_case("info_nce", _info_nce_guided, margin=0.1, strategy="relative"),
    "distillation": _distillation_case(of_samples=True),
    "distillation of pairs": _distillation_case(of_samples=False),
    "distillation, teacher_keys": _distillation_case(of_samples=True, teacher_keys=True),
    "distillation of pairs, teacher_keys": _distillation_case(of_samples=False, teacher_keys=True),
    "siglip": Case(loss="siglip", plain=_siglip, pairs=True, recipe="two_tower"),
    "dcl": Case(loss="dcl", plain=of_views(plain_dcl)),
    "dclw": Case(loss="dclw", plain=of_views(plain_dcl, sigma=0.5)),
    "gcl": Case(loss="gcl", plain=_gcl, partition=1, recipe="sogclr"),
    "gcl of pairs": Case(
        loss="gcl",
        plain=_gcl_of_pairs,
        partition=2,
        pairs=True,
        recipe="two_tower",
        run={"negatives.store": "partition"},
    ),
    "supcon": Case(loss="supcon", plain=_supcon),
    "poly_view": _poly_view_case("geometric"),
    "poly_view, arithmetic": _poly_view_case("arithmetic"),
    "nnclr": Case(
        loss="nnclr", plain=_nnclr, negatives=True, recipe="nnclr", run={"negatives.store": "queue"}
    ),
    "nce": Case(loss="nce", plain=_nce, own_slot=True, no_ring=ALONE, recipe="instance_discrimination"),
    "hinge": _hinge_case(hardest=False, bidirectional=True),
    "hinge of the hardest": _hinge_case(hardest=True, bidirectional=True),
    "hinge of queries": _hinge_case(hardest=False, bidirectional=False),
    "hinge of queries, of the hardest": _hinge_case(hardest=True, bidirectional=False),
    "hinge, queue alone": Case(
        loss="hinge",
        plain=lambda batch: _hinge(batch, in_batch=False, bidirectional=False),
        settings={"in_batch": False},
        no_ring=ALONE,
        **OF_PAIRS,
        run=QUEUE_ALONE,
    ),
}


class _Tower(nn.Module):
    """A linear network whose rows have unit length."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, rows: Tensor) -> Tensor:
        return F.normalize(rows @ self.weight.T, dim=1)


def make_views_of(setup: Setup) -> tuple[Tensor, Tensor]:
    """Return queries and keys, or the rows that become them in chunks."""
    return make_views(setup.batch, setup.dim, noise=1.0)


def make_inputs(setup: Setup) -> list[Tensor]:
    """Return all tensors that get a gradient, in the order of ``INPUTS``."""
    sides = make_views_of(setup)
    if setup.chunks > 1:
        sides = tuple(make_rows(setup.dim, setup.dim, seed=seed) for seed in (5, 6))
    scalars = torch.tensor(setup.temperature), torch.tensor(-2.0)
    others = (
        make_rows(16 * setup.scale, setup.dim),
        make_rows(40 * setup.scale, setup.dim, seed=7),
    )
    return [nn.Parameter(each.to(setup.dtype)) for each in (*sides, *scalars, *others)]


def make_ids(case: Case, setup: Setup) -> dict[str, Tensor]:
    """Return the ids of queries, keys, explicit negatives and queue, and labels."""
    batch, k = setup.batch, setup.scale
    query, key = torch.arange(batch), torch.arange(batch)
    negative, queue = 3 * batch + torch.arange(16 * k), 5 * batch + torch.arange(40 * k)
    if setup.repeated_ids:
        # The first and the last pairs, on different workers, share a query; the next and the last ones share a key.
        # So the last key is a positive of the first query, and it is also among the explicit negatives.
        query[-k:], key[-k:] = torch.arange(k), torch.arange(k, 2 * k)
        negative[:k], negative[9 * k : 10 * k], negative[-k:] = key[-k:], key[-k:], key[-k:] + k
        queue = torch.arange(40 * k) % (31 * k)
    ids = {"query": query, "key": key if case.pairs else query, "negative": negative, "queue": queue}
    return ids | {"label": torch.arange(batch) % (5 * k)}


def make_weights(setup: Setup) -> Tensor:
    """Return the weight of each sample, some of them 0; those of the second half of the batch are larger."""
    sample = torch.arange(setup.batch)
    return (sample % 7 * (1 + 2 * sample // setup.batch)).double()


def make_guide(case: Case, setup: Setup) -> tuple[Tensor, Tensor, Tensor]:
    """Return a guide's queries, keys and explicit negatives: of other numbers than the rows, but related."""
    dim = setup.dim if case.settings.get("teacher_keys") else 7
    views = make_views(setup.batch, dim, noise=0.6, seed=11)
    return *views, make_rows(16 * setup.scale, dim, seed=12)


def _guide_of(case: Case, setup: Setup, own: slice, explicit: slice | None) -> Guide | None:
    if case.guide is None:
        return None
    query, key, negatives = make_guide(case, setup)
    if not case.pairs:
        key = query  # both views of a sample have one embedding
    return Guide.of(query[own], key[own], None if explicit is None else negatives[explicit], **case.guide)


def on_a_worker(rank: int, num_workers: int, name: str, setup: Setup) -> tuple[list[Tensor], int]:
    """Return the loss and all gradients, and the number of transfers around the ring."""
    case, inputs = CASES[name], make_inputs(setup)
    ids, own, sizes = make_ids(case, setup), worker_spans(setup.batch, num_workers)[rank], setup.num_negatives
    explicit = slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))
    has_explicit = case.negatives and setup.explicit
    names = ExampleIds(
        query=ids["query"][own, None],
        key=ids["key"][own, None],
        negative=ids["negative"][explicit, None] if has_explicit else None,
        label=ids["label"][own],
        guide=_guide_of(case, setup, own, explicit if has_explicit else None),
    )
    batch, stored = IdExchange(torch.device("cpu")).start(names)(), StoreBatch()
    if setup.weights:
        batch = replace(batch, weight=mean_one(make_weights(setup)[own]))
    query, key = inputs[0][own], inputs[1][own]
    if setup.chunks > 1:
        size = -(-setup.batch // (num_workers * setup.chunks))
        query, key = (
            embed_in_chunks(_Tower(weight), rows[own].to(setup.dtype), chunk_size=size)
            for weight, rows in zip(inputs, make_views_of(setup), strict=False)
        )
    key = other_views(case, query, key)
    if case.own_slot:
        stored = StoreBatch(key=key.detach(), negatives=inputs[5].detach(), negative_id=ids["queue"])
    elif case.partition:
        logs = stored_partitions(setup.batch, case.partition)[own].log()
        stored = StoreBatch(partition=Partition(logs))
    elif case.negatives and case.guide is None and setup.queue:
        stored = StoreBatch(negatives=inputs[5], negative_id=ids["queue"])
    stored = stored.for_batch(batch, inputs[4][explicit] if has_explicit else None)
    objective = build_objective(case, inputs[2], inputs[3])
    rooms = ("softmax", "siglip", "hinge", "nce", "clip", "ring", "distillation")
    tiles = tiny_tiles_in(*rooms) if setup.tiny_tiles else contextlib.nullcontext()
    limit = patch.object(collectives, "MAX_GATHERED_BYTES", 0 if setup.by_ring else 2**60)
    with tiles, limit, patch.object(collectives, "RingTransfer", wraps=RingTransfer) as transfers:
        loss = objective(query, None if case.own_slot else key, stored, batch)
        return results(loss, inputs), transfers.call_count


def build_objective(case: Case, temperature: Tensor, bias: Tensor) -> Objective:
    """Return the objective of a case, whose normalizing constant comes from its first batch."""
    settings = {"pairs": case.pairs, "margin": MARGIN, **case.settings}
    settings |= {"num_samples": NUM_SLOTS, "normalizer": NormalizingConstant(NUM_SLOTS)}
    settings["bank_momentum"] = MOMENTUM
    return LOSSES[case.loss].build(temperature=temperature, bias=bias, **settings)


def results(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the loss and its gradients, with zeros for unused inputs."""
    loss.backward()
    return [loss.detach(), *(torch.zeros_like(each) if each.grad is None else each.grad for each in inputs)]


def on_workers(name: str, setup: Setup) -> list[Tensor]:
    """Return the loss and the gradients as DDP averages them; check that a ring is used when it is expected."""
    found = run_workers(on_a_worker, setup.num_workers, name, setup)
    expected = setup.by_ring and not CASES[name].no_ring and setup.num_workers > 1
    assert all((transfers > 0) == expected for _, transfers in found), f"{name}: {found[0][1]} transfers"
    return [torch.stack(each).mean(0) for each in zip(*(each for each, _ in found), strict=True)]


def on_the_whole_batch(name: str, setup: Setup) -> list[Tensor]:
    """Return the plain loss of the whole batch in float64, and its gradients at the inputs of the setup."""
    return _on_the_whole_batch(name, replace(setup, num_workers=1, by_ring=False, tiny_tiles=False))


@cache
def _on_the_whole_batch(name: str, setup: Setup) -> list[Tensor]:
    case, inputs = CASES[name], [nn.Parameter(each.double()) for each in make_inputs(setup)]
    ids, sides = make_ids(case, setup), inputs[:2]
    if setup.chunks > 1:
        rows = make_views_of(setup)
        sides = [_Tower(weight)(each.double()) for weight, each in zip(sides, rows, strict=True)]
    used = {"negative": case.negatives and setup.explicit}
    used["queue"] = case.own_slot or (case.negatives and case.guide is None and setup.queue)
    pools = dict(zip(("negative", "queue"), inputs[4:], strict=True))
    batch = Batch(
        query=sides[0],
        key=sides[1],
        temperature=inputs[2],
        bias=inputs[3],
        others=torch.cat([pool[: len(pool) if used[kind] else 0] for kind, pool in pools.items()]),
        query_id=ids["query"],
        key_id=ids["key"],
        other_id=torch.cat([ids[kind][: len(pool) if used[kind] else 0] for kind, pool in pools.items()]),
        label=ids["label"],
        weight=make_weights(setup) if setup.weights else None,
        guide=make_guide(case, setup),
    )
    return results(case.plain(batch), inputs)
