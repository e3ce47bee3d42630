"""Five steps of every recipe compared with plain torch in float64: losses and weights."""

import copy
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from raycl.data import in_memory
from raycl.data.in_memory import Batch
from raycl.losses.example_ids import ExampleIds
from raycl.losses.logq import Frequencies
from raycl.training.views import Views
from tests.plain_steps import PlainRun
from tests.pretend_gpu import CPU
from tests.pretended_steps import (
    CASES,
    CHUNKS,
    CLIPPED,
    NUM_SAMPLES,
    QUEUE,
    ROWS,
    SMALL,
    TEXTS,
    VIEWS,
    VIT,
    Case,
    Worker,
)

STEPS = 5
# Samples repeat after three steps, and a few texts repeat often.
LARGE_QUEUE = {"negatives.capacity": 4 * ROWS}
MOCO = SMALL | QUEUE | LARGE_QUEUE
BANK = SMALL | {"negatives.num_negatives": 60, "stages.0.proximal_weight": 0.5}
FEW = {"num_texts": 3 * ROWS}
HINGE = {"stages.0.loss": "hinge"}
SIGLIP = {"stages.0.loss": "siglip", "stages.0.bias": -2.0, "learn_temperature": True}
MIXED = {"stages.0.hinge_weight": 0.3}
PREFIXES = {"stages.0.matryoshka_dims": (4, 8), "stages.0.matryoshka_weights": (0.5, 2.0)}
HEADS = {"projection_head.hidden_dim": 32, "prediction_head.hidden_dim": 32}
PREDICTED = {"stages.0.loss": "info_nce", "prediction_head.num_layers": 2}
WEIGHTS = {"data.columns.weight": "weight"}
BATCH_ONLY = {"negatives.explicit": False}
GLOBAL = {"stages.0.loss": "gcl", "negatives.store": "partition"}
LARGE_CROPS = {"augment.views": [{"count": 2}, {"count": 2, "size": 24}]}
SMALL_CROPS = {"augment.views": [{"count": 2}, {"count": 1, "size": 8, "crop_scale": [0.05, 0.4]}]}
RECIPES = {
    **{
        name: replace(case, **FEW)
        for name, case in CASES.items()
        if case.settings.get("precision") != "bfloat16"
    },
    "simclr info_nce": Case("simclr", SMALL | {"stages.0.loss": "info_nce"}),
    "simclr dcl, chunks": Case(
        "simclr", SMALL | CHUNKS | {"stages.0.loss": "dcl", "learn_temperature": True}
    ),
    "simclr dclw": Case("simclr", SMALL | {"stages.0.loss": "dclw"}),
    "simclr hinge of all": Case("simclr", SMALL | HINGE),
    "simclr mixed": Case("simclr", SMALL | MIXED),
    "simclr local": Case("simclr", SMALL | {"batchnorm": "local"}),
    "simclr views, info_nce": Case("simclr", SMALL | VIEWS | {"stages.0.loss": "info_nce"}),
    "simclr views, queue": Case(
        "simclr", SMALL | VIEWS | LARGE_QUEUE | {"negatives.store": "queue", "stages.0.loss": "info_nce"}
    ),
    "simclr views, mixed": Case("simclr", SMALL | VIEWS | MIXED | {"learn_temperature": True}),
    "simclr views, prefixes, weights": Case("simclr", SMALL | VIEWS | PREFIXES | WEIGHTS),
    "simclr views, group norm, chunks": Case("simclr", SMALL | LARGE_CROPS | CHUNKS | {"batchnorm": "group"}),
    "simclr views, small crops": Case(
        "simclr", SMALL | {"augment.views": [{"count": 2}, {"count": 4, "size": 8}], "stages.0.loss": "dclw"}
    ),
    "simclr poly_view, arithmetic, chunks, weights": Case(
        "simclr",
        SMALL
        | VIEWS
        | WEIGHTS
        | CHUNKS
        | PREFIXES
        | {"stages.0.loss": "poly_view", "stages.0.view_mean": "arithmetic", "learn_temperature": True},
    ),
    "simclr views of full size": Case("simclr", SMALL | {"augment.views": [{"count": 4}]}),
    "moco_v2 views, synchronized, chunks": Case(
        "moco_v2",
        SMALL | VIEWS | CHUNKS | {"negatives.capacity": 2 * ROWS, "batchnorm": "synchronized"},
    ),
    "simclr clipped, chunks": Case("simclr", SMALL | CHUNKS | CLIPPED),
    "two_tower clipped": Case("two_tower", TEXTS | CLIPPED | {"learn_temperature": True}, **FEW),
    "clip averaged, chunks": Case("clip", CASES["clip"].settings | CHUNKS | {"ema_decay": 0.999}, **FEW),
    "moco_v2 averaged": Case("moco_v2", MOCO | {"ema_decay": 0.5}),
    "simclr prefixes, chunks": Case("simclr", SMALL | CHUNKS | PREFIXES),
    "moco_v2 prefixes": Case("moco_v2", MOCO | PREFIXES),
    "two_tower prefixes": Case(
        "two_tower", TEXTS | PREFIXES | {"learn_temperature": True}, explicit=True, **FEW
    ),
    "simclr layer norm": Case("simclr", SMALL | {"batchnorm": "layer"}),
    "simclr shuffled, chunks": Case(
        "simclr", SMALL | CHUNKS | {"batchnorm": "shuffled", "batchnorm_groups": 4}
    ),
    "moco_v1": Case("moco_v1", MOCO),
    "moco_v2": Case("moco_v2", MOCO),
    "moco_v2 hinge": Case("moco_v2", MOCO | HINGE),
    "moco_v2 mixed, in batch": Case(
        "moco_v2", SMALL | LARGE_QUEUE | MIXED | {"batchnorm": "synchronized", "negatives.in_batch": True}
    ),
    "moco_v3": Case("moco_v3", VIT),
    "moco_v3 chunks, weights": Case("moco_v3", VIT | CHUNKS | WEIGHTS),
    "moco_v3 shuffled, queue": Case(
        "moco_v3",
        SMALL
        | LARGE_QUEUE
        | HEADS
        | {"batchnorm": "shuffled", "batchnorm_groups": 4, "negatives.store": "queue"},
    ),
    "moco_v3 prefixes, mixed": Case("moco_v3", SMALL | HEADS | PREFIXES | MIXED),
    "simclr predicted, shuffled": Case(
        "simclr",
        SMALL | PREDICTED | {"batchnorm": "shuffled", "batchnorm_groups": 4, "learn_temperature": True},
    ),
    "moco_v3 crops": Case(
        "moco_v3",
        SMALL | HEADS | SMALL_CROPS,
    ),
    "nnclr": Case("nnclr", SMALL | HEADS | LARGE_QUEUE | {"learn_temperature": True}),
    "nnclr chunks, shuffled, prefixes": Case(
        "nnclr",
        SMALL
        | HEADS
        | CHUNKS
        | PREFIXES
        | {"negatives.capacity": 2 * ROWS, "batchnorm": "shuffled", "batchnorm_groups": 4},
    ),
    "nnclr crops, half precision": Case(
        "nnclr", SMALL | HEADS | SMALL_CROPS | LARGE_QUEUE | {"bank.dtype": "float16"}
    ),
    "simcse predicted": Case("simcse", TEXTS | PREDICTED, **FEW),
    "instance_discrimination": Case("instance_discrimination", BANK),
    "instance_discrimination, first estimate": Case(
        "instance_discrimination", BANK | {"negatives.normalizer_momentum": None}
    ),
    "instance_discrimination info_nce": Case(
        "instance_discrimination", BANK | MIXED | {"stages.0.loss": "info_nce"}
    ),
    "instance_discrimination info_nce, weights": Case(
        "instance_discrimination", BANK | WEIGHTS | {"stages.0.loss": "info_nce"}
    ),
    "instance_discrimination hinge": Case("instance_discrimination", BANK | HINGE),
    "simcse queue": Case(
        "simcse", TEXTS | {"negatives.store": "queue", "negatives.capacity": 3 * ROWS}, **FEW
    ),
    "simcse mixed": Case("simcse", TEXTS | MIXED, **FEW),
    "esimcse": Case(
        "esimcse", TEXTS | {"negatives.capacity": 3 * ROWS, "text_augment.repetition": 0.0}, **FEW
    ),
    "two_tower discount": Case(
        "two_tower", TEXTS | {"stages.0.logq_correction": "simple"}, explicit=True, **FEW
    ),
    "two_tower refined discount": Case(
        "two_tower", TEXTS | {"stages.0.logq_correction": "refined"}, explicit=True, **FEW
    ),
    "two_tower separate": Case("two_tower", TEXTS | {"separate_towers": True}, explicit=True, **FEW),
    "two_tower separate, chunks": Case(
        "two_tower", TEXTS | CHUNKS | {"separate_towers": True}, explicit=True, **FEW
    ),
    "two_tower hinge": Case("two_tower", TEXTS | HINGE, explicit=True, **FEW),
    "two_tower mixed": Case("two_tower", TEXTS | MIXED, explicit=True, **FEW),
    "two_tower info_nce": Case("two_tower", TEXTS | {"stages.0.loss": "info_nce"}, explicit=True, **FEW),
    "two_tower siglip": Case("two_tower", TEXTS | SIGLIP | BATCH_ONLY, **FEW),
    "two_tower siglip, fixed": Case(
        "two_tower", TEXTS | SIGLIP | BATCH_ONLY | {"learn_temperature": False}, **FEW
    ),
    "siglip": Case("siglip", CASES["clip"].settings | {"stages.0.bias": -2.0}, **FEW),
    "dcl": Case("dcl", SMALL),
    "supcon": Case("supcon", SMALL),
    "simcse supcon, weights": Case("simcse", TEXTS | WEIGHTS | {"stages.0.loss": "supcon"}, **FEW),
    "sogclr": Case("sogclr", SMALL),
    "sogclr, chunks, weights": Case(
        "sogclr", SMALL | CHUNKS | WEIGHTS | {"negatives.bank_momentum": 0.7, "learn_temperature": True}
    ),
    "clip gcl": Case("clip", CASES["clip"].settings | GLOBAL, **FEW),
    "two_tower gcl, ids, chunks, weights": Case(
        "two_tower",
        TEXTS
        | CHUNKS
        | WEIGHTS
        | BATCH_ONLY
        | GLOBAL
        | {"negatives.bank_momentum": 0.7, "learn_temperature": True},
        explicit=True,
        **FEW,
    ),
    "simclr siglip, chunks, weights": Case("simclr", SMALL | CHUNKS | SIGLIP | WEIGHTS),
    "two_tower queue": Case(
        "two_tower", TEXTS | {"negatives.store": "queue", "negatives.capacity": 3 * ROWS}, **FEW
    ),
    "two_tower queue, ids": Case(
        "two_tower",
        TEXTS | {"negatives.store": "queue", "negatives.capacity": 3 * ROWS},
        explicit=True,
        **FEW,
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_five_steps_equal_plain_torch(name: str) -> None:
    # In small images group normalization has few values, and its rounding grows.
    size = 32 if RECIPES[name].settings.get("batchnorm") == "group" else 16
    worker = Worker(replace(RECIPES[name], image_size=size), device=CPU)
    learner = worker.learner
    for module in (learner.tower, learner.prediction_head, learner.momentum_encoder, learner.temperature):
        if module is not None:
            module.double()
    if worker.learner.ema is not None:
        worker.learner.ema.double()
    batches = [in_float64(views) for views in worker.maker.views(worker.batches(STEPS))]
    names = [names_of(worker, rows) for rows in worker.batches(STEPS)]
    count = synthetic_counts(names) if worker.stage.logq_correction != "none" else {}
    worker.frequencies = Frequencies(
        torch.tensor(sorted(count)),
        torch.tensor([count[each] for each in sorted(count)]).log(),
        math.log(sum(count.values()) or 1),
    )
    state = worker.store.state_dict()
    plain = PlainRun(
        worker.config,
        worker.learner.tower,
        prediction_head=worker.learner.prediction_head,
        slots=state["rows"] if worker.config.key == "memory_bank" else None,
        count=count,
        num_samples=NUM_SAMPLES,
    )
    # Banks compute in float32, and counts are float32 as well.
    is_bank = worker.config.negatives.store in ("memory_bank", "partition")
    tolerance = 3e-6 if is_bank or count else 1e-10
    before = [each.clone() for each in weights_of(plain)]
    for step, views in enumerate(batches):
        torch.manual_seed(step)  # of dropout
        plain_loss = plain.step(views, names[step], step, learning_rate=0.01, momentum=0.9)
        torch.manual_seed(step)
        stepped = worker.step(views, step, is_watched=True)
        assert stepped.loss == pytest.approx(plain_loss, rel=tolerance)
        limit = worker.config.optimizer.max_grad_norm
        if limit is not None:
            assert stepped.measure()["grad_norm"] == pytest.approx(plain.grad_norm)
            assert plain.grad_norm > limit
    tolerance = max(tolerance, 1e-8)  # AdamW divides by the gradient's magnitude, which may be tiny
    assert_moved_alike(worker.weights(), weights_of(plain), before, tolerance)
    if plain.partitions:
        stored = worker.store.state_dict()
        found = dict(zip(stored["sample_id"].tolist(), stored["rows"].exp().tolist(), strict=True))
        assert {each for each in found if any(found[each])} == set(plain.partitions)
        assert all(
            found[each] == pytest.approx(plain.partitions[each], rel=1e-5) for each in plain.partitions
        )
    if worker.learner.momentum_encoder is not None:
        follower = [each.detach() for each in worker.learner.momentum_encoder.parameters()]
        expected = [each.detach() for each in plain.momentum_tower.parameters()]
        assert_moved_alike(follower, expected, before, tolerance)
    if worker.learner.ema is not None:
        averages = [each.detach() for each in worker.learner.evaluated.parameters()]
        assert_moved_alike(averages, plain.average, before, tolerance)
        assert not averages[0].equal(worker.weights()[0])


def test_averaged_weights_continue_from_a_checkpoint_to_the_last_bit() -> None:
    first, resumed = (Worker(CASES["simclr averaged"], device=CPU) for _ in range(2))
    batches = list(first.maker.views(first.batches(4)))
    for step in (0, 1):
        first.step(batches[step], step)
    resumed.learner.load_state_dict(copy.deepcopy(first.learner.state_dict()))
    for worker in (first, resumed):
        for step in (2, 3):
            worker.step(batches[step], step)
    assert first.learner.ema is not None and first.learner.evaluated is first.learner.ema.tower
    expected = first.learner.evaluated.state_dict()
    assert all(each.equal(expected[name]) for name, each in resumed.learner.evaluated.state_dict().items())


def names_of(worker: Worker, rows: Batch) -> ExampleIds:
    weight = in_memory.weights_of(rows)
    names, _ = worker.maker.transform.ids_and_negatives(rows)
    return names if weight is None else replace(names, weight=torch.from_numpy(weight))


def in_float64(views: Views) -> Views:
    def cast(rows: Tensor | None) -> Tensor | None:
        return rows.double() if rows is not None and rows.is_floating_point() else rows

    changed: dict[str, Any] = {name: cast(getattr(views, name)) for name in ("view_a", "view_b", "negatives")}
    changed |= {name: tuple(map(cast, getattr(views, name))) for name in ("further", "crops")}
    return replace(views, **changed)


def synthetic_counts(batches: list[ExampleIds]) -> dict[int, int]:
    known = [names for batch in batches for names in (batch.key, batch.negative)]
    texts = {text for names in known if names is not None for text in names[:, 0].tolist()}
    return {text: 1 + text % 7 for text in texts}


def weights_of(plain: PlainRun) -> list[Tensor]:
    learned = [plain.log_temperature] if plain.config.learn_temperature else []
    learned += [plain.bias] if learned and plain.stage.loss == "siglip" else []
    return [each.detach() for each in [*plain.weights(), *learned]]


def assert_moved_alike(
    found: list[Tensor], expected: list[Tensor], before: list[Tensor], tolerance: float
) -> None:
    moved = max(float((now - then).abs().max()) for now, then in zip(expected, before, strict=False))
    apart = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    assert moved > 1e-4, "nothing was learned"
    assert apart <= tolerance * moved
