"""Keys from a pool of actors, here in this process: the same keys as a worker's, and the right ages."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.training.driver import check_cluster, cpus_of_a_worker, encoders_that_fit, workers_that_fit
from raycl.training.encoder_pool import Encoded
from raycl.training.key_encoders import MIXED_BATCHES, KeyClient, KeyEncoder, rows_of
from raycl.training.pools import prepare_encoder
from raycl.training.step import train_step
from raycl.training.views import Views
from tests.pretend_gpu import CPU
from tests.pretended_steps import QUEUE, ROWS, SMALL, Case, Worker

pytestmark = pytest.mark.usefixtures("process_settings")

POOL = {"momentum_encoder.location": "actors", "gpu": False}
GROUP = SMALL | {"batchnorm": "group", "negatives.capacity": 2 * ROWS}
FROZEN = {"momentum_encoder.momentum": 1.0}


@dataclass
class Pool:
    """Encodes rows in this process, or returns their sample ids as embeddings; ``lost`` requests get no answer."""

    encoder: KeyEncoder | None = None
    lost: tuple[int, ...] = ()
    published: list[int] = field(default_factory=list)
    requests: list[Any] = field(default_factory=list)

    def begin(self) -> str:
        return "attempt"

    def publish(self, weights: Any, *, step: int, attempt: str) -> None:
        self.weights = {name: each.copy() for name, each in weights.items()}
        self.published.append(step)

    def encode(self, rows: Any, *, waited_s: float, caller: int, **how: Any) -> Any:
        number = len(self.requests)
        self.requests.append(rows)
        if self.encoder is None:
            found = np.repeat(rows.sample_id[None, :, None], 2, axis=2).astype(np.float32)
        else:
            self.encoder.load(self.weights)
            found = self.encoder.encode(rows, **how)
        answer = None if number in self.lost else Encoded(found, self.published[-1], 1)
        return SimpleNamespace(encoded=answer, waited_s=0.0)


class Run:
    """The steps of a worker with a pool."""

    def __init__(self, recipe: str, settings: dict[str, Any], *, encodes: bool = True, **pool: Any) -> None:
        self.worker = Worker(Case(recipe, settings | POOL), device=CPU)
        config = self.worker.config
        self.pool = Pool(KeyEncoder(config, None, None) if encodes else None, **pool)
        self.client = KeyClient(self.pool, config, CPU)  # type: ignore[arg-type]
        self.momentum_encoder = self.worker.learner.momentum_encoder
        assert self.momentum_encoder is not None
        self.client.begin(self.momentum_encoder.tower, step=0)

    def views(self, num_steps: int) -> Iterator[Views]:
        batches = self.client.sent_ahead(self.worker.batches(num_steps), self.worker.stage, epoch=0, start=0)
        return self.worker.maker.views(batches)

    def publish(self, step: int) -> None:
        assert self.momentum_encoder is not None
        self.client.publish(self.momentum_encoder.tower, step=step)


@pytest.mark.parametrize("settings", [{}, {"stages.0.chunk_size": 16}, {"stages.0.image_size": 24}], ids=str)
def test_keys_of_a_pool_equal_keys_of_the_worker_if_rows_share_no_statistics(
    settings: dict[str, Any],
) -> None:
    run = Run("moco_v2", GROUP | settings)
    learner = run.worker.learner
    size = run.worker.stage.image_size
    batches = run.client.sent_ahead(run.worker.batches(3), run.worker.stage, epoch=0, start=0)
    for step, views in enumerate(run.worker.maker.views(batches, image_size=size)):
        pooled = learner.embed(views, step=step, take_keys=run.client.take)
        own = learner.embed(views, step=step)
        assert pooled.key is not None and own.key is not None
        torch.testing.assert_close(pooled.key, own.key, rtol=0, atol=2e-6)
        torch.testing.assert_close(pooled.query, own.query, rtol=0, atol=0)
    assert len(run.pool.requests) == 3


def test_both_views_of_a_sample_have_keys_of_a_pool_with_a_prediction_head() -> None:
    heads = {"projection_head.hidden_dim": 32, "prediction_head.hidden_dim": 32}
    run = Run("moco_v3", SMALL | heads | {"batchnorm": "layer", "optimizer.name": "sgd"})
    learner = run.worker.learner
    for step, views in enumerate(run.views(2)):
        pooled = learner.embed(views, step=step, take_keys=run.client.take)
        own = learner.embed(views, step=step)
        for found, expected in zip(pooled.pairs, own.pairs, strict=True):
            torch.testing.assert_close(found.key, expected.key, rtol=0, atol=2e-6)
    assert len(run.pool.requests) == 2


@pytest.mark.parametrize("batchnorm", ["group", "shuffled"])
@pytest.mark.parametrize("ahead", [2, 5])
def test_every_row_gets_its_own_key_back_with_the_age_of_its_weights(batchnorm: str, ahead: int) -> None:
    settings = {
        "negatives.capacity": 2 * ROWS,
        "batchnorm": batchnorm,
        "momentum_encoder.ahead": ahead,
        "momentum_encoder.max_age": 50,
    }
    run = Run("moco_v2", SMALL | settings, encodes=False)
    num_steps, num_mixed = 4 * MIXED_BATCHES, MIXED_BATCHES if batchnorm == "shuffled" else 1
    ages = []
    for step, views in enumerate(run.views(num_steps)):
        found = run.client.take(step)
        assert found is not None
        assert found.keys[0, :, 0].tolist() == views.ids.tolist()
        ages.append(set((step - found.step).tolist()))
        run.publish(step + 1)
    # The batches of the first steps are sent before the first step.
    first = num_mixed * -(-(ahead + num_mixed - 1) // num_mixed)
    assert ages[first:] == [{ahead + step % num_mixed} for step in range(first, num_steps)]
    measured = run.client.metrics()
    assert measured["key_age_max"] == ahead + num_mixed - 1
    assert measured["key_age_mean"] == pytest.approx(np.mean([max(each) for each in ages]))
    assert measured["own_keys_fraction"] == 0.0
    assert run.client.metrics() == {}


def test_requests_mix_the_rows_of_several_batches_if_rows_share_statistics() -> None:
    run = Run("moco_v2", SMALL | QUEUE, encodes=False)
    batches = list(run.worker.batches(MIXED_BATCHES + 2))
    for batch, number in zip(batches, range(10), strict=False):
        batch.sample_id[:] = np.arange(ROWS) + number * ROWS
    # Batches of several data sets may be of several passes.
    batches = [replace(batch, epoch=number % 3) for number, batch in enumerate(batches)]
    list(run.client.sent_ahead(iter(batches), run.worker.stage, epoch=0, start=0))
    sent = [request.sample_id for request in run.pool.requests]
    whole, rest = sent[:MIXED_BATCHES], sent[MIXED_BATCHES:]
    assert [len(each) for each in sent] == [ROWS] * (MIXED_BATCHES + 2)
    assert sorted(np.concatenate(whole)) == list(range(MIXED_BATCHES * ROWS))
    assert sorted(np.concatenate(rest)) == list(range(MIXED_BATCHES * ROWS, (MIXED_BATCHES + 2) * ROWS))
    for ids in whole:
        counts = np.bincount(ids // ROWS, minlength=MIXED_BATCHES)
        assert (counts > 0).all() and counts.max() < ROWS / 2
    for request in run.pool.requests:  # and their images
        number, place = request.sample_id // ROWS, request.sample_id % ROWS
        images = np.stack(
            [batches[n].contents["image"].images[p] for n, p in zip(number, place, strict=True)]
        )
        np.testing.assert_array_equal(request.contents["image"].images, images)
        np.testing.assert_array_equal(request.epoch, number % 3)


def test_an_encoder_normalizes_the_groups_of_a_request_by_themselves() -> None:
    run = Run("moco_v2", SMALL | QUEUE)
    encoder = run.pool.encoder
    assert encoder is not None
    (batch,) = run.worker.batches(1)
    how = {"views": (1,), "seed": 0, "image_size": None, "chunk_size": None}
    whole = encoder.encode(batch, rows_per_group=4, **how)[0]
    for begin in range(0, ROWS, 4):
        part = encoder.encode(rows_of(batch, slice(begin, begin + 4)), rows_per_group=4, **how)[0]
        np.testing.assert_allclose(whole[begin : begin + 4], part, rtol=0, atol=2e-6)
    assert np.abs(whole - encoder.encode(batch, rows_per_group=ROWS, **how)[0]).max() > 1e-2


def test_a_single_batch_is_not_sent_if_rows_share_statistics() -> None:
    run = Run("moco_v2", SMALL | QUEUE)
    (views,) = run.views(1)
    embedded = run.worker.learner.embed(views, step=0, take_keys=run.client.take)
    assert not run.pool.requests
    assert embedded.key_step is not None and embedded.key_step.tolist() == [0] * ROWS
    assert run.client.metrics()["own_keys_fraction"] == 1.0


def test_a_key_was_made_by_the_weights_of_its_step() -> None:
    settings = {"momentum_encoder.ahead": 2, "momentum_encoder.publish_every": 3}
    run = Run("moco_v2", GROUP | settings)
    reference = KeyEncoder(run.worker.config, None, None)
    encoder = run.momentum_encoder
    assert encoder is not None
    weights, stamps = [], []
    for step, views in enumerate(run.views(9)):
        weights.append({name: each.numpy().copy() for name, each in encoder.tower.state_dict().items()})
        output = run.worker.learner.embed(views, step=step, take_keys=run.client.take)
        assert output.key is not None and output.key_step is not None
        (stamp,) = set(output.key_step.tolist())
        stamps.append(stamp)
        reference.load(weights[stamp])
        batch = next(each for number, each in enumerate(run.worker.batches(9)) if number == step)
        how = {"views": (1,), "seed": 0, "image_size": None, "rows_per_group": None, "chunk_size": None}
        np.testing.assert_allclose(output.key.numpy(), reference.encode(batch, **how)[0], rtol=0, atol=2e-6)
        with torch.no_grad():  # a change that a wrong stamp would show
            for parameter in encoder.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        run.publish(step + 1)
    assert stamps == [0, 0, 0, 0, 0, 3, 3, 3, 6]


def test_keys_that_are_too_old_or_lost_are_encoded_by_the_worker() -> None:
    settings = GROUP | {"momentum_encoder.max_age": 2, "momentum_encoder.publish_every": 100}
    run = Run("moco_v2", settings, lost=(1,))
    is_own = []
    for step, views in enumerate(run.views(5)):
        pooled = run.worker.learner.embed(views, step=step, take_keys=run.client.take)
        own = run.worker.learner.embed(views, step=step)
        assert pooled.key is not None and own.key is not None and pooled.key_step is not None
        is_own.append(pooled.key_step.tolist() == [step] * ROWS and step > 0)
        if is_own[-1]:
            assert torch.equal(pooled.key, own.key)
    assert is_own == [False, True, False, True, True]
    assert run.client.metrics()["own_keys_fraction"] == 3 / 5


def test_rows_of_the_queue_have_the_steps_of_their_weights() -> None:
    run = Run("moco_v2", GROUP)
    stamps = []
    for step, views in enumerate(run.views(6)):
        contrast = run.worker.learner.objective(run.worker.config, run.worker.stage, hinge_weight=0.0)
        train_step(
            run.worker.learner,
            run.worker.store,
            contrast,
            views,
            step=step,
            learning_rate=0.01,
            momentum=0.9,
            precision="float32",
            embed=partial(run.worker.learner.embed, take_keys=run.client.take),
        )
        run.publish(step + 1)
        stamps.append(max(0, step - 2))
    state = run.worker.store.state_dict()
    assert sorted(state["step"].tolist()) == sorted(stamps[-2:] * ROWS)
    ages = run.worker.store.metrics(step=5, seconds=1.0)
    assert (ages["negatives_age_mean"], ages["negatives_age_max"]) == (3.5, 4.0)


def test_max_age_zero_trains_like_keys_by_workers_to_the_last_bit() -> None:
    losses = []
    for settings in ({}, {"momentum_encoder.location": "actors", "momentum_encoder.max_age": 0}):
        worker = Worker(Case("moco_v2", SMALL | QUEUE | {"gpu": False} | settings), device=CPU)
        assert not worker.config.uses_key_pool
        losses.append(
            [
                worker.step(views, step).loss
                for step, views in enumerate(worker.maker.views(worker.batches(4)))
            ]
        )
    assert losses[0] == losses[1]


def test_the_leakage_probe_draws_the_view_that_the_step_did_not() -> None:
    run = Run("moco_v2", SMALL | QUEUE)
    other = Worker(Case("moco_v2", SMALL | QUEUE | {"gpu": False}), device=CPU)
    views, expected = next(run.views(1)), next(other.maker.views(other.batches(1)))
    assert views.view_b is None
    assert torch.equal(views.key_views()[0], expected.key_views()[0])
    assert run.worker.learner.leakage(views, seed=0) == other.learner.leakage(expected, seed=0)
    assert replace(views).second_view() is not None


def test_a_worker_draws_the_view_of_a_key_in_float32_within_a_step_in_bfloat16() -> None:
    settings = SMALL | QUEUE | {"augment.blur": 1.0}
    run, other = Run("moco_v2", settings), Worker(Case("moco_v2", settings | {"gpu": False}), device=CPU)
    views, expected = next(run.views(1)), next(other.maker.views(other.batches(1)))
    with torch.autocast("cpu", torch.bfloat16):
        drawn = views.second_view()
    assert drawn is not None
    assert torch.equal(drawn, expected.key_views()[0])


@pytest.mark.parametrize(
    ("gpus", "precision", "expected"),
    [
        (0.0, "auto", ("cpu", "float32")),
        (0.0, "bfloat16", ("cpu", "bfloat16")),
        (0.5, "auto", ("cuda", "bfloat16")),
    ],
)
def test_encoders_without_a_gpu_of_their_own_compute_on_the_cpu(
    gpus: float, precision: str, expected: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)  # Ray does not hide the GPUs of the workers
    monkeypatch.setattr("raycl.training.pools.prepare_process", lambda _: None)
    monkeypatch.setattr("raycl.training.pools.prepare_device", lambda config, _: config)
    pool = {"location": "actors", "gpus_per_actor": gpus}
    settings = {"gpu": True, "precision": precision} | {f"momentum_encoder.{k}": v for k, v in pool.items()}
    config = override(recipe("moco_v2", image_size=32), settings)
    config, device = prepare_encoder(config, config.momentum_encoder)
    assert (device.type, config.tower_precision) == expected


@pytest.mark.parametrize(
    ("cpus", "streamed", "settings", "expected"),
    [
        (8, False, {}, (1, 4)),
        (4, False, {}, (1, 2)),
        (4, True, {}, (1, 1)),
        (2, False, {}, (1, 1)),  # the workers get less than a CPU each
        (4, False, {"momentum_encoder.cpus_per_actor": 0.5}, (1, 4)),
        (2, False, {"autoscaling": True}, (1, 4)),
        (8, False, {"min_workers": 1, "cpus_per_worker": 1.0}, (1, 4)),
        (4, True, {"min_workers": 1, "cpus_per_worker": 1.0}, (1, 1)),  # as many workers as fit
        (8, False, {"gpu": True, "momentum_encoder.gpus_per_actor": 0.5}, (1, 2)),
    ],
)
def test_the_pool_leaves_the_cpus_of_workers_and_data_tasks(
    cpus: int,
    streamed: bool,
    settings: dict[str, Any],
    expected: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": float(cpus), "GPU": 3.0})
    pool = {
        "momentum_encoder.location": "actors",
        "momentum_encoder.actors": 4,
        "momentum_encoder.min_actors": 1,
    }
    config = override(recipe("moco_v2"), {"workers": 2} | pool | settings)
    assert encoders_that_fit(config, config.momentum_encoder, streamed=streamed) == expected
    taken = 2 * cpus_of_a_worker(config, 2, streamed=streamed)
    least = config.momentum_encoder.cpus_per_actor
    assert config.autoscaling or taken + least + streamed <= cpus


@pytest.mark.parametrize(
    ("gpus", "settings", "expected"),
    [
        (8, {"momentum_encoder.gpus_per_actor": 1}, (2, 7)),
        (8, {"momentum_encoder.gpus_per_actor": 1, "momentum_encoder.actors": 3}, (2, 5)),
        (8, {"momentum_encoder.gpus_per_actor": 0.4}, (2, 7)),  # a worker takes a whole GPU
        (3, {"momentum_encoder.gpus_per_actor": 2}, (2, 2)),
        (8, {"momentum_encoder.gpus_per_actor": 1, "autoscaling": True}, (2, 8)),
        (4, {}, (2, 8)),  # Ray Train takes as many as there are
    ],
)
def test_elastic_workers_leave_the_gpus_of_the_pool(
    gpus: int, settings: dict[str, Any], expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 64.0, "GPU": float(gpus)})
    pool = {"gpu": True, "workers": 8, "momentum_encoder.location": "actors"}
    config = override(recipe("moco_v2"), pool | settings)
    assert workers_that_fit(config, (2, 8), streamed=False) == expected


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"momentum_encoder.actors": 4}, "momentum_encoder needs 4 CPUs for 4 actors, and the cluster has 4"),
        (
            {"momentum_encoder.gpus_per_actor": 0.5},
            "momentum_encoder needs 0.5 GPUs for 1 actors, and the workers leave 0",
        ),
        (
            {"momentum_encoder.node_label": "zone=b"},
            "no node has the label zone=b of momentum_encoder.node_label",
        ),
    ],
)
def test_a_pool_that_cannot_fit_is_refused_in_one_line(
    settings: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"Alive": True, "Labels": {"zone": "a"}, "Resources": {"CPU": 4.0}}]
    )
    pool = {"momentum_encoder.location": "actors", "cpus_per_worker": 1.0}
    config = override(recipe("moco_v2"), pool | settings)
    with pytest.raises(ConfigError, match=problem):
        check_cluster(config, streamed=False, report=lambda _: None)


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"cpus_per_actor": 16}, "1 actors of 16 CPUs and 0 GPUs, and the nodes have room for 0; lower"),
        ({"actors": 16}, None),
        ({"actors": 5, "node_label": "zone=a", "cpus_per_actor": 2}, "label zone=a have room for 4; lower"),
        ({"actors": 5, "min_actors": 4, "node_label": "zone=a", "cpus_per_actor": 2}, None),
        (
            {"node_label": "zone=b", "gpus_per_actor": 0.5},
            "0.5 GPUs, and the nodes with the label zone=b have",
        ),
        ({"actors": 4, "node_label": "zone=a", "gpus_per_actor": 0.5}, None),
    ],
)
def test_each_actor_of_a_pool_must_fit_on_a_node_with_its_label(
    settings: dict[str, Any], problem: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        {"Alive": True, "Labels": {"zone": "a"}, "Resources": {"CPU": 8.0, "GPU": 2.0}},
        {"Alive": True, "Labels": {"zone": "b"}, "Resources": {"CPU": 12.0}},
    ]
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 20.0, "GPU": 2.0})
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    pool = {"location": "actors", **settings}
    changes = {f"momentum_encoder.{name}": value for name, value in pool.items()}
    config = override(recipe("moco_v2"), {"gpu": False, **changes})
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        check_cluster(config, streamed=False, report=lambda _: None)
