"""A complete step on several workers equals a step in one process on the whole batch."""

import copy
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raycl.batchnorm import leakage, synchronize
from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.distributed import collectives
from raycl.losses import nt_xent
from raycl.losses.example_ids import ExampleIds
from raycl.losses.nt_xent import NtXent
from raycl.losses.objective import StoreBatch
from raycl.models.build import build_towers, find_unused_parameters
from raycl.models.towers import Tower, build_projection_head
from raycl.optim import build_optimizer
from raycl.recipes import recipe
from raycl.training.step import train_step
from raycl.training.stores import build_store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.views import Views
from tests.images import write_digits
from tests.pairs import vocabulary
from tests.recorded_runs import record_run, small_config
from tests.settings import override_active
from tests.workers.processes import run_workers

BATCH = 16


def build_tower() -> Tower:
    torch.manual_seed(0)
    encoder = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )
    return Tower(encoder, build_projection_head(32, num_layers=2, hidden_dim=None, dim=12)).double()


class DoubleTower(nn.Module):
    """A tower in float64 with a learned temperature, so that only the mathematics differs."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = build_tower()
        self.log_temperature = nn.Parameter(torch.tensor(-1.5, dtype=torch.float64))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        rows = self.tower.projection_head(self.tower.encoder(images))
        return nn.functional.normalize(rows, dim=1), self.log_temperature.exp()


def make_views() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    view_a = torch.rand(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    view_b = view_a + 0.1 * torch.rand(BATCH, 3, 6, 6, generator=generator, dtype=torch.float64)
    # Two samples on different workers share an id: they are false negatives of each other.
    sample_id = torch.arange(BATCH)
    sample_id[BATCH - 1] = 0
    return view_a, view_b, sample_id


def gradients_of_a_worker(rank: int, num_workers: int) -> list[Tensor]:
    module = DoubleTower()
    synchronize(module)
    parallel = DistributedDataParallel(module) if num_workers > 1 else module
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    view_a, view_b, sample_id = (each[rows] for each in make_views())
    embedding, temperature = parallel(torch.cat([view_a, view_b]))
    loss = NtXent(temperature=temperature)
    loss(*embedding.chunk(2), StoreBatch(), ExampleIds(query=sample_id, key=sample_id)).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.fixture(scope="module")
def whole_batch() -> list[Tensor]:
    module = DoubleTower()
    view_a, view_b, sample_id = make_views()
    embedding, temperature = module(torch.cat([view_a, view_b]))
    nt_xent(*embedding.chunk(2), temperature=temperature, sample_id=sample_id).backward()
    return [parameter.grad for parameter in module.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("num_workers", [1, 2, 4])
def test_workers_give_the_gradient_of_the_whole_batch_for_towers_and_temperature(
    num_workers: int, whole_batch: list[Tensor]
) -> None:
    for gradients in run_workers(gradients_of_a_worker, num_workers):
        assert len(gradients) == len(whole_batch)
        for ours, expected in zip(gradients, whole_batch, strict=True):
            assert (ours - expected).norm() <= 1e-5 * expected.norm() + 1e-12


QUEUE, SLOTS = {"negatives.capacity": 40}, {"negatives.num_negatives": 20}
HARDEST = {"stages.0.loss": "hinge", "stages.0.hardest_negative": True, "stages.0.margin": 0.9}
MANY = {"augment.views": [{"count": 3}, {"count": 2}]}
# AdamW would enlarge the rounding of small gradients.
HEADS = {"projection_head.hidden_dim": 24, "prediction_head.hidden_dim": 24, "optimizer.name": "sgd"}
METHODS: dict[str, dict[str, Any]] = {
    "simclr": {},
    "simclr with a clipped gradient": {"recipe": "simclr", "optimizer.max_grad_norm": 0.05},
    "simclr with muon": {"recipe": "simclr", "optimizer.name": "muon"},
    "simclr with averaged weights": {"recipe": "simclr", "ema_decay": 0.5},
    "sogclr": {"negatives.bank_momentum": 0.4},
    "sogclr of many views": {"recipe": "sogclr"} | MANY,
    "simclr of shuffled views": {"recipe": "simclr", "batchnorm": "shuffled", "batchnorm_groups": 4},
    "simclr by the hinge with the hardest negatives": {"recipe": "simclr"} | HARDEST,
    "simclr of many views": {"recipe": "simclr"} | MANY,
    "simclr of many views with a learned temperature": (
        {"recipe": "simclr", "batchnorm": "layer", "learn_temperature": True} | MANY
    ),
    "moco_v2 of many views": {"recipe": "moco_v2", "batchnorm_groups": 4} | QUEUE | MANY,
    "moco of many views with synchronized statistics": (
        {"recipe": "moco_v2", "batchnorm": "synchronized"} | QUEUE | MANY
    ),
    "moco by a mixture": {"recipe": "moco_v2", "batchnorm_groups": 4, "stages.0.hinge_weight": 0.3} | QUEUE,
    "moco_v2": {"batchnorm_groups": 4, "stages.0.temperature": 0.2} | QUEUE,
    "moco with the other keys of the batch as well": (
        {"recipe": "moco_v1", "batchnorm": "synchronized", "negatives.in_batch": True} | QUEUE
    ),
    "moco_v3": HEADS,
    "moco_v3 with a queue and shuffled views": (
        {"recipe": "moco_v3", "batchnorm": "shuffled", "batchnorm_groups": 4, "negatives.store": "queue"}
        | HEADS
        | QUEUE
    ),
    "nnclr": {"projection_head.hidden_dim": 24, "prediction_head.hidden_dim": 24} | QUEUE,
    "simclr with predicted and shuffled views": (
        {"recipe": "simclr", "batchnorm": "shuffled", "batchnorm_groups": 4, "stages.0.loss": "info_nce"}
        | {"prediction_head.num_layers": 2}
    ),
    "instance_discrimination": {"batchnorm": "layer", "negatives.normalizer_momentum": 0.5} | SLOTS,
    "a bank's slots by their softmax, pulled": (
        {"recipe": "instance_discrimination", "batchnorm": "group", "stages.0.loss": "info_nce"}
        | {"stages.0.proximal_weight": 0.5}
        | SLOTS
    ),
}


def config_of(method: str, num_workers: int) -> RunConfig:
    settings = {"recipe": method, **METHODS[method]}
    small = {"workers": num_workers, "stages.0.batch_size": BATCH, "bank.location": "worker"}
    base = recipe(settings.pop("recipe"), image_size=8)
    return override_active(base, {**small, "projection_head.dim": 12}, settings)


def further_views(view_a: Tensor, view_b: Tensor) -> dict[str, tuple[Tensor, ...]]:
    """Return a third view of full size and two small crops, each a function of its own sample."""
    return {"further": (view_a.flip(3) + view_b,), "crops": (view_a[:, :, :4, :4], view_b[:, :, 2:, 2:])}


def losses_weights_and_rows_after_steps(
    rank: int,
    num_workers: int,
    method: str,
    chunk_size: int | None = None,
    max_gathered_bytes: int = collectives.MAX_GATHERED_BYTES,
) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    collectives.MAX_GATHERED_BYTES = max_gathered_bytes
    config = override(config_of(method, num_workers), {"stages.0.chunk_size": chunk_size})
    tower = build_towers(config, None, build_tower().encoder.float())
    learner = TrainState.build(config, tower, num_samples=50)
    stage = config.stages[0]
    learner.set_embed_config(EmbedConfig.of(config, stage))
    store = build_store(config, None, np.arange(50), torch.device("cpu"))
    learner.wrap_ddp(torch.device("cpu"))
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    view_a, view_b, _ = (each[rows] for each in make_views())
    others: dict[str, Any] = further_views(view_a.float(), view_b.float()) if config.num_views > 2 else {}
    losses = []
    for step in range(5):
        # Samples alternate between steps, so that the store holds more than one batch.
        ids = torch.arange(BATCH)[rows] + (step % 2) * BATCH
        views = Views(
            view_a=view_a.float(),
            view_b=view_b.float(),
            sample_id=ids,
            ids=ids.numpy(),
            example_ids=ExampleIds(query=ids, key=ids),
            **others,
        )
        settings: dict[str, Any] = {"learning_rate": 0.05, "momentum": 0.9, "precision": "float32"}
        settings["is_watched"] = is_clipped = config.optimizer.max_grad_norm is not None
        contrast = learner.objective(config, stage, hinge_weight=stage.hinge_weight, num_samples=50)
        asked = step == 3 and rank == num_workers - 1
        settings["check_requested"] = step in (2, 3) and rank == 0
        stepped = train_step(learner, store, contrast, views, step=step, stop_requested=asked, **settings)
        # On all workers, not only on the one that asked.
        assert (stepped.stop_requested, stepped.check_requested) == (step == 3, step in (2, 3))
        losses.append(stepped.loss)
        if is_clipped:
            losses.append(stepped.measure()["grad_norm"])
    modules = (tower, learner.prediction_head, learner.momentum_encoder)
    weights = [each.detach() for module in modules if module is not None for each in module.parameters()]
    if learner.ema is not None:
        learner.average_statistics()
        weights += list(learner.evaluated.state_dict().values())
    return losses, weights, store.state_dict()


@functools.cache
def on_one_worker(method: str) -> tuple[list[float], list[Tensor], dict[str, Any]]:
    return run_workers(losses_weights_and_rows_after_steps, 1, method)[0]


@pytest.mark.parametrize(("num_workers", "chunk_size"), [(2, None), (1, 12), (2, 4)])  # 16 and 8 rows
@pytest.mark.parametrize("method", METHODS)
def test_workers_and_chunks_have_the_losses_weights_and_store_of_the_whole_batch(
    method: str, num_workers: int, chunk_size: int | None
) -> None:
    assert_equals_the_whole_batch(method, num_workers, chunk_size)


@pytest.mark.parametrize(
    "method",
    [
        "simclr",
        "simclr of many views",
        "sogclr",
        "moco with the other keys of the batch as well",
        "moco_v3",
    ],
)
def test_rows_too_large_to_gather_use_a_ring_with_the_same_result(method: str) -> None:
    assert_equals_the_whole_batch(method, 2, None, 0)


def assert_equals_the_whole_batch(
    method: str, num_workers: int, chunk_size: int | None, *max_gathered_bytes: int
) -> None:
    alone = on_one_worker(method)
    together = run_workers(
        losses_weights_and_rows_after_steps, num_workers, method, chunk_size, *max_gathered_bytes
    )
    assert len(set(alone[0])) == len(alone[0])
    for losses, weights, rows in together:
        assert losses == pytest.approx(alone[0], rel=1e-4)
        for ours, expected in zip(weights, alone[1], strict=True):
            assert torch.allclose(ours, expected, rtol=1e-3, atol=1e-5)
        assert rows.keys() == alone[2].keys()
        for name, values in rows.items():
            if name == "rows":
                assert torch.allclose(values, alone[2][name], rtol=1e-3, atol=1e-4)
            else:
                assert torch.equal(torch.as_tensor(values), torch.as_tensor(alone[2][name]))


def leakage_of_views(rank: int, num_workers: int, encoder: nn.Module | None = None) -> dict[str, float]:
    config = config_of("moco_v2", num_workers)
    towers = build_towers(config, None, encoder or build_tower().encoder.float())
    learner = TrainState.build(config, towers, num_samples=None)
    assert learner.momentum_encoder is not None
    with torch.no_grad():
        for each in learner.momentum_encoder.parameters():
            each.add_(each.flip(0), alpha=0.5)
    learner.set_embed_config(EmbedConfig.of(config, config.stages[0]))
    rows = slice(rank * BATCH // num_workers, (rank + 1) * BATCH // num_workers)
    view_a, view_b = (each.float() for each in make_views()[:2])
    view_a, view_b = view_a[rows], view_b.lerp(view_b.flip(0), 0.7)[rows]  # few positives are nearest
    ids = torch.arange(BATCH)[rows]
    views = Views(
        view_a=view_a,
        view_b=view_b,
        sample_id=ids,
        ids=ids.numpy(),
        example_ids=ExampleIds(query=ids, key=ids),
    )
    encoders = learner.tower, learner.momentum_encoder
    own = leakage(*encoders, view_a, view_b, group_size=4, num_groupings=2, seed=5)
    return {"own": own.advantage, **learner.leakage(views, seed=5)}


@pytest.mark.parametrize("num_workers", [1, 2])
def test_the_leakage_of_query_and_key_encoder_is_the_mean_over_workers(num_workers: int) -> None:
    found = run_workers(leakage_of_views, num_workers)
    advantages = [each["own"] for each in found]
    assert len({0.0, *advantages}) == 1 + num_workers
    for each in found:
        assert each["batchnorm_leakage"] == pytest.approx(sum(advantages) / num_workers)


def test_a_network_without_batchnorm_has_no_leakage_to_report() -> None:
    encoder = nn.Sequential(nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(2), nn.Flatten())
    assert leakage_of_views(0, 1, encoder) == {"own": 0.0}


CROPS = {"augment.views": [{"count": 2}, {"count": 2, "size": 8}]}


@pytest.mark.parametrize(
    "settings", [{}, {"stages.0.chunk_size": 8}, CROPS], ids=["whole", "chunks", "two sizes"]
)
def test_workers_train_an_encoder_with_a_layer_that_the_forward_pass_leaves_out(
    settings: dict[str, Any], tmp_path: Path
) -> None:
    data = write_digits(tmp_path / "digits.parquet", 120)
    network = {"encoder.name": "tests.cluster.networks:headed", "encoder.kwargs.dropout": 0.0}
    losses = []
    for workers in (1, 2):
        config = small_config("simclr", {"workers": workers, "stages.0.steps": 4} | network | settings)
        run = record_run(config, data, tmp_path / f"run{workers}")
        lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines])
    assert len(losses[0]) == 4
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


class RandomDepth(nn.Module):
    """Six layers, of which each pass in training mode keeps three at random."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, rows: Tensor) -> Tensor:
        kept = torch.randperm(6)[:3].tolist() if self.training else range(6)
        for number in sorted(kept):
            rows = rows + torch.relu(self.layers[number](rows))
        return rows


def gradients_of_random_depth(rank: int, num_workers: int, chunk_size: int) -> list[tuple[Any, Any]]:
    """Return the averaged gradient of each parameter, and the one of this worker's part of the loss."""
    torch.manual_seed(0)
    tower = Tower(RandomDepth(), build_projection_head(8, num_layers=1, hidden_dim=None, dim=8)).train()
    own = copy.deepcopy(tower)
    state = TrainState(tower, build_optimizer("sgd", tower, momentum=0.0))
    state.set_embed_config(EmbedConfig(chunk_size=chunk_size))
    state.wrap_ddp(torch.device("cpu"))
    rows, weights = torch.randn(4, 8), torch.randn(4, 8)
    torch.manual_seed(rank)  # of the layers
    state.backward((state.encode(rows) * weights).sum())
    torch.manual_seed(rank)
    chunks = rows.split(chunk_size)
    torch.cat([own(chunk) for chunk in chunks]).mul(weights).sum().backward()
    pairs = zip(tower.parameters(), own.parameters(), strict=True)
    return [(one.grad, torch.zeros_like(two) if two.grad is None else two.grad) for one, two in pairs]


@pytest.mark.parametrize("chunk_size", [2, 4])
def test_workers_that_skip_different_layers_average_the_gradients_of_equal_parameters(
    chunk_size: int,
) -> None:
    found = run_workers(gradients_of_random_depth, 2, chunk_size)
    is_skipped = [[not own.any() for _, own in each] for each in found]
    assert is_skipped[0] != is_skipped[1] or chunk_size == 2
    for of_first, of_second in zip(*found, strict=True):
        mean = (of_first[1] + of_second[1]) / 2
        assert torch.allclose(of_first[0], mean, atol=1e-6)
        assert torch.equal(of_first[0], of_second[0])


@pytest.mark.parametrize("method", ["simclr", "simcse", "two_tower", "clip"])
def test_the_encoders_of_raycl_leave_no_parameter_unused(method: str) -> None:
    config = recipe(method, image_size=32)
    assert not find_unused_parameters(config, build_towers(config, vocabulary()), vocabulary())
