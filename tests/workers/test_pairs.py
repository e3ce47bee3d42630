"""A step on texts and pairs on several workers equals a step in one process on the whole batch."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycl.config import RunConfig
from raycl.data.in_memory import Batch, InMemoryDataset
from raycl.losses.example_ids import ExampleIds, IdExchange
from raycl.models.build import build_towers
from raycl.training.guide import EmbeddingTable, GuideTables
from raycl.training.step import train_step
from raycl.training.stores import build_store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.transforms import build_transform, count_documents
from raycl.training.views import ViewMaker
from tests.embeddings import make_rows
from tests.pairs import TRANSFORMER, clicks, noise_images, rows_of, small_config, vocabulary
from tests.texts import invented_texts
from tests.workers.processes import run_workers

BATCH, STEPS = 16, 5
PAIRS = ("query", "document")
WITH_NEGATIVES = (*PAIRS, "negatives")
IDS = ("query_id", "document_id", "negative_ids")
# Negatives per worker: some have none in the first step, all have none in the second; then one to four.
NUM_NEGATIVES = [*[0] * 12, 3, 0, 0, 1, *[0] * BATCH, *[1, 4, 0, 2, 3, 0, 0, 1] * (BATCH // 8 * (STEPS - 2))]
LEARNED = {"learn_temperature": True}
QUEUE = {"negatives.store": "queue", "negatives.capacity": 40}
WEIGHTS = {"data.columns.weight": "weight"}
PREFIXES = {"stages.0.matryoshka_dims": (4, 8), "stages.0.matryoshka_weights": (0.5, 2.0)}
SEPARATE: dict[str, Any] = {
    "separate_towers": True,
    "encoder.name": "transformer",
    "encoder.kwargs": TRANSFORMER,
}

ALL = (*WITH_NEGATIVES, *IDS)
HEAD = {"projection_head.num_layers": 2, "projection_head.dim": 12, "projection_head.batchnorm": False}
HINGE = {"stages.0.loss": "hinge", "stages.0.margin": 0.9}
HARDEST = HINGE | {"stages.0.hardest_negative": True}
INFO_NCE = {"stages.0.loss": "info_nce"}
MIXED = {"stages.0.hinge_weight": 0.3, "stages.0.margin": 0.9}
GUIDE = {"negatives.guide.query": "guide/queries", "negatives.guide.document": "guide/documents"}
SIGLIP = {"stages.0.loss": "siglip", "stages.0.bias": -2.0, "negatives.explicit": False}
OUTSIDE = {"negatives.in_batch": False}
# The recipe of each case, its settings and the columns of its data set.
CASES: dict[str, tuple[str, dict[str, Any], tuple[str, ...]]] = {
    "one tower for both": ("two_tower", LEARNED, PAIRS),
    "a tower for each": ("two_tower", LEARNED | SEPARATE, PAIRS),
    "a tower for each with a head": ("two_tower", SEPARATE | HEAD, WITH_NEGATIVES),
    "explicit negatives": ("two_tower", LEARNED, WITH_NEGATIVES),
    "explicit negatives by names": ("two_tower", LEARNED, ALL),
    "negatives known by their texts alone": ("two_tower", {}, (*WITH_NEGATIVES, "query_id", "document_id")),
    "a queue of documents besides": ("two_tower", LEARNED | QUEUE, ALL),
    "a queue in half precision": ("two_tower", SEPARATE | QUEUE | {"bank.dtype": "float16"}, WITH_NEGATIVES),
    "the hinge": ("two_tower", HINGE, ALL),
    "the hinge with the hardest negatives": ("two_tower", HARDEST, ALL),
    "the hinge without the batch": ("two_tower", HARDEST | QUEUE | OUTSIDE, ALL),
    "infonce": ("two_tower", LEARNED | INFO_NCE, ALL),
    "infonce without the batch": ("two_tower", LEARNED | QUEUE | INFO_NCE | OUTSIDE, ALL),
    "explicit negatives and nothing else": ("two_tower", INFO_NCE | OUTSIDE, ALL),
    "a mixture": ("two_tower", LEARNED | QUEUE | MIXED, ALL),
    "logq": ("two_tower", LEARNED | {"stages.0.logq_correction": "simple"}, WITH_NEGATIVES),
    "refined logq": ("two_tower", LEARNED | QUEUE | {"stages.0.logq_correction": "refined"}, ALL),
    "weights and prefixes": ("two_tower", LEARNED | QUEUE | WEIGHTS | PREFIXES, (*ALL, "weight")),
    "guide": ("two_tower", LEARNED | GUIDE | {"negatives.guide.margin": 0.1}, ALL),
    "guide of explicit negatives alone": ("two_tower", INFO_NCE | OUTSIDE | GUIDE | PREFIXES, ALL),
    "siglip": ("two_tower", LEARNED | SIGLIP, (*PAIRS, "query_id", "document_id")),
    "images and captions": ("clip", {}, ("image", "caption")),
    "weighted images of a smaller stage, and captions": (
        "clip",
        WEIGHTS | {"data.image_size": 12, "stages.0.image_size": 8},
        ("image", "caption", "weight"),
    ),
    "simcse": ("simcse", LEARNED, ("text",)),
    "simcse with a guide": (
        "simcse",
        {"negatives.guide.query": "guide/texts", "negatives.guide.margin": 0.8},
        ("text",),
    ),
    "esimcse": ("esimcse", {"negatives.capacity": 40}, ("text",)),
}


def values_of(recipe: str) -> dict[str, list[Any]]:
    """Return the values of all columns that a data set for this recipe may have."""
    num_rows = BATCH * STEPS
    weights = [row % 5 / 2 for row in range(num_rows)]
    if recipe == "two_tower":
        return clicks(num_rows, num_negatives=NUM_NEGATIVES) | {"weight": weights}
    random, texts = Random(0), invented_texts(60, seed=2)
    # One to three texts per row, from so few texts that rows on different workers share some.
    lists = [random.choices(texts, k=1 + row % 3) for row in range(num_rows)]
    return {"text": lists, "caption": lists, "image": noise_images(num_rows), "weight": weights}


def config_of(case: str, num_workers: int, chunk_size: int | None) -> RunConfig:
    recipe, settings, _ = CASES[case]
    small = {"workers": num_workers, "stages.0.batch_size": BATCH, "stages.0.chunk_size": chunk_size}
    temperature = {} if settings.get("stages.0.loss") == "hinge" else {"stages.0.temperature": 0.2}
    return small_config(recipe, temperature | small | settings)


def guide_of(config: RunConfig) -> GuideTables | None:
    """Return embeddings of all ids that ``clicks`` may have, if the run has a guide."""
    if config.negatives.guide.query is None:
        return None
    query, document = (
        EmbeddingTable(np.arange(100), make_rows(100, 8, seed).numpy().astype(np.float16)) for seed in (1, 2)
    )
    return GuideTables(query=query, document=document, margin=config.negatives.guide.margin, relative=False)


def shares(rows: InMemoryDataset, rank: int, num_workers: int) -> Iterator[Batch]:
    """Yield this worker's part of each batch; the whole batch does not depend on the number of workers."""
    local_batch = BATCH // num_workers
    for step in range(STEPS):
        yield rows.take(step * BATCH + rank * local_batch + np.arange(local_batch), epoch=step)


def losses_weights_and_rows_after_steps(
    rank: int, num_workers: int, case: str, chunk_size: int | None = None, roles: tuple[str, ...] = ()
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    config, device = config_of(case, num_workers, chunk_size), torch.device("cpu")
    values = values_of(config.recipe)
    rows = rows_of(config, {role: values[role] for role in roles or CASES[case][2]})
    stage = config.stages[0]
    transform = build_transform(config, vocabulary().tokenizer, guide_of(config))
    towers = build_towers(config, vocabulary())
    learner = TrainState.build(config, towers, num_samples=None)
    learner.set_embed_config(EmbedConfig.of(config, stage))
    learner.wrap_ddp(device)
    store = build_store(config, None, None, device)
    frequencies = count_documents(config, rows, torch.device("cpu"))
    losses = []
    batches = shares(rows, rank, num_workers)
    maker = ViewMaker.of(config, transform, device)
    for step, views in enumerate(maker.views(batches, image_size=stage.image_size)):
        contrast = learner.objective(config, stage, hinge_weight=stage.hinge_weight, frequencies=frequencies)
        settings: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.9, "precision": "float32"}
        is_guided = views.example_ids.guide is not None
        output = train_step(learner, store, contrast, views, step=step, is_watched=is_guided, **settings)
        if is_guided:
            assert output.collapsed_loss is None
            assert 0 <= output.measure()["guide_masked_fraction"] < 1  # 0 without negatives
        losses.append(output.loss)
    parts = filter(None, (towers, learner.temperature, learner.momentum_encoder))
    weights = [parameter.detach() for part in parts for parameter in part.parameters()]
    return losses, weights, store.state_dict()


def first_weights(case: str) -> list[Tensor]:
    config = config_of(case, 1, None)
    towers = build_towers(config, vocabulary())
    return [parameter.detach() for parameter in towers.parameters()]


@functools.cache
def on_one_worker(case: str) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    return run_workers(losses_weights_and_rows_after_steps, 1, case)[0]


# Two workers without chunks are between four, and two with chunks; one case has them too.
SPLITS = [(4, None), (1, 12), (2, 3)]


@pytest.mark.parametrize(
    ("case", "num_workers", "chunk_size"),
    [("one tower for both", 2, None), *((case, *split) for case in CASES for split in SPLITS)],
)
def test_workers_and_chunks_have_the_losses_weights_and_store_of_the_whole_batch(
    case: str, num_workers: int, chunk_size: int | None
) -> None:
    losses, weights, rows = on_one_worker(case)
    assert len(set(losses)) == STEPS
    # Unchanged weights would be equal in any case.
    moved = [
        bool((now - then).abs().max() > 1e-4) for now, then in zip(weights, first_weights(case), strict=False)
    ]
    assert all(moved)
    for its_losses, its_weights, its_rows in run_workers(
        losses_weights_and_rows_after_steps, num_workers, case, chunk_size
    ):
        assert its_losses == pytest.approx(losses, rel=1e-5)
        for ours, expected in zip(its_weights, weights, strict=True):
            assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-6)
        assert its_rows.keys() == rows.keys()
        for name, value in its_rows.items():
            rtol, atol = (1e-3, 1e-5) if name == "rows" else (0.0, 0.0)
            ours, expected = torch.as_tensor(value), torch.as_tensor(rows[name])
            assert torch.allclose(ours, expected, rtol=rtol, atol=atol), name


def test_ids_reveal_false_negatives_that_texts_do_not() -> None:
    case = "explicit negatives by names"
    by_texts = run_workers(losses_weights_and_rows_after_steps, 1, case, None, WITH_NEGATIVES)[0][0]
    for by_names, other in zip(on_one_worker(case)[0], by_texts, strict=True):
        assert abs(by_names - other) > 1e-3


def identified(rank: int, num_workers: int, batches: list[list[ExampleIds]]) -> list[ExampleIds]:
    exchange = IdExchange(torch.device("cpu"))
    # The second batch has more explicit negatives than the first.
    return [exchange.start(workers[rank])() for workers in batches]


@pytest.mark.parametrize("num_negatives", [[0, 0, 0, 0], [3, 0, 1, 5], [0, 9, 0, 0], None])
@pytest.mark.parametrize("shared_id_space", [False, True])
@pytest.mark.parametrize("num_names", [1, 2, 3])
def test_workers_assign_the_same_ids_as_one_worker(
    num_names: int, shared_id_space: bool, num_negatives: list[int] | None
) -> None:
    generator = torch.Generator().manual_seed(0)

    def names(num_rows: int) -> Tensor:
        return torch.randint(-25, 25, (num_rows, num_names), generator=generator)

    parts = [
        ExampleIds(
            query=names(6),
            key=names(6),
            negative=None if num_negatives is None else names(count),
            label=torch.randint(-1, 3, (6,), generator=generator),
            shared_id_space=shared_id_space,
            num_shown=1 if num_names == 3 else None,
        )
        for count in num_negatives or [0] * 4
    ]
    whole = ExampleIds(
        query=torch.cat([part.query for part in parts]),
        key=torch.cat([part.key for part in parts]),
        negative=None
        if num_negatives is None
        else torch.cat([part.negative for part in parts if part.negative is not None]),
        label=torch.cat([part.label for part in parts if part.label is not None]),
        shared_id_space=shared_id_space,
        num_shown=1 if num_names == 3 else None,
    )
    (expected,) = identified(0, 1, [[whole]])
    fewer = [replace(part, negative=None if part.negative is None else part.negative[:1]) for part in parts]
    found = [ids[1] for ids in run_workers(identified, 4, [fewer, parts])]
    assert torch.equal(torch.cat([ids.query for ids in found]), expected.query)
    assert torch.equal(torch.cat([ids.key for ids in found]), expected.key)
    assert expected.label is not None
    assert torch.equal(torch.cat([ids.label for ids in found]), expected.label)
    for ids in found:
        stored = torch.arange(-30, 30)  # names of rows in the batch, and others
        assert torch.equal(ids.of(stored), expected.of(stored))
        if expected.negative is None:
            assert ids.negative is None
        else:
            assert torch.equal(ids.negative, expected.negative)
            assert ids.num_negatives == tuple(num_negatives or ())
