"""The global contrastive loss on one process; see also workers/test_objectives.py and test_plain_steps.py."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import clip, dcl, gcl
from raycl.losses.dcl import decoupled
from raycl.losses.example_ids import ExampleIds
from raycl.losses.gcl import Gcl
from raycl.losses.objective import Partition, StoreBatch, mean_over_pairs, pair_views
from raycl.negatives import MemoryBank
from tests.embeddings import make_views
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.plain_losses import plain_gcl, plain_gcl_of_pairs

pytestmark = pytest.mark.usefixtures("one_thread")
UNKNOWN = -math.inf
NUM_SAMPLES = 1_000


def some_partitions(batch: int, temperature: float) -> Tensor:
    """Return log u [batch, 1] in the range of the logits; the first ones are unknown."""
    logs = torch.rand(batch, 1, generator=torch.Generator().manual_seed(3)) / temperature
    logs[: batch // 4] = UNKNOWN
    return logs


@pytest.mark.parametrize("momentum", (0.0, 0.1, 0.8))
@pytest.mark.parametrize("temperature", (0.5, 0.07, 0.01))
def test_value_gradient_and_partition_functions_equal_the_plain_formula(
    temperature: float, momentum: float
) -> None:
    inputs = *make_views(300, 8, noise=1.0), torch.tensor(temperature)
    exact, single = leaves(*inputs, dtype=torch.float64), leaves(*inputs)
    logs, settings = some_partitions(300, temperature), {"momentum": momentum, "num_samples": NUM_SAMPLES}
    stored = logs[:, 0].double().exp()
    expected, partitions = plain_gcl(*exact, stored=stored, **settings)
    found, of_batch = gcl(*single[:2], temperature=single[2], log_partition=logs, **settings)
    # At 0.01 log u is up to 100, and its rounding to float32 changes u by 4e-6.
    tolerance = 1e-5 if temperature > 0.01 else 3e-5
    assert_close(value_and_gradients(found, single), value_and_gradients(expected, exact), tolerance)
    assert_close([of_batch[:, 0]], [partitions.log()], 1e-5)


@pytest.mark.parametrize(("momentum", "logs"), [(0.0, some_partitions(40, 0.1)), (0.9, UNKNOWN)])
def test_the_gradient_is_that_of_dcl_if_the_partition_functions_are_the_batchs_own(
    momentum: float, logs: Tensor | float
) -> None:
    views, ids = leaves(*make_views(40, 8, noise=1.0), dtype=torch.float64), torch.arange(40) % 38
    log_partition = logs if isinstance(logs, Tensor) else torch.full((40, 1), logs)
    settings = {"temperature": 0.1, "sample_id": ids}
    loss, of_batch = gcl(*views, log_partition=log_partition, momentum=momentum, num_samples=500, **settings)
    expected = dcl(*views, **settings)
    (value, *gradients), (decoupled, *theirs) = (
        value_and_gradients(each, views) for each in (loss, expected)
    )
    assert_close(gradients, theirs, 1e-12)
    # The sum over the negatives of the batch becomes the sum over the data.
    assert value.item() == pytest.approx(decoupled.item() + math.log(499 / 39), rel=1e-12)
    assert of_batch.isfinite().all()


def test_stored_partition_functions_have_the_mean_and_the_variance_of_a_moving_average_over_the_data() -> (
    None
):
    temperature, size, batch = 0.2, 128, 8
    views, order = make_views(size, 8, noise=0.3), np.random.default_rng(0)
    rows, same = torch.cat(views).double(), torch.eye(size, dtype=torch.bool).repeat(2, 2)
    exact = (rows @ rows.T / temperature).exp().masked_fill(same, 0).sum(1).view(2, -1).mean(0) / (
        2 * size - 2
    )
    slots = {
        momentum: MemoryBank(np.arange(size), 1, seed=0, momentum=momentum, kind="partition")
        for momentum in (0.0, 0.8, 0.95)
    }
    settings = {"temperature": temperature, "momentum": 0.0, "num_samples": size}
    log_partition = torch.full((batch, 1), UNKNOWN)
    epochs = np.concatenate([order.permutation(size) for _ in range(80)])
    for step, own in enumerate(epochs.reshape(-1, batch)):
        _, of_batch = gcl(*(view[own] for view in views), log_partition=log_partition, **settings)
        for each in slots.values():
            each.update(own, of_batch.numpy(), step)
    errors = {
        momentum: torch.from_numpy(each.negatives().rows)[:, 0].exp() / exact - 1
        for momentum, each in slots.items()
    }
    spread = errors[0.0].square().mean().sqrt().item()
    for momentum in (0.8, 0.95):
        expected = spread * math.sqrt((1 - momentum) / (1 + momentum))
        assert errors[momentum].square().mean().sqrt().item() == pytest.approx(expected, rel=0.3)
        assert abs(errors[momentum].mean().item()) < expected / 2


def of_pairs(
    views: list[Tensor], stored: Tensor, ids: tuple[Tensor, Tensor], *, momentum: float, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Return the loss of pairs, and the estimates of their partition functions [batch, 2] from the batch."""
    partition, names = Partition(stored), ExampleIds(query=ids[0], key=ids[1])
    objective = Gcl(pairs=True, bank_momentum=momentum, **settings)
    loss = objective(views[0], views[1], StoreBatch(partition=partition), names)
    return loss, partition.of_batch()


@pytest.mark.parametrize(("temperature", "momentum"), [(0.5, 0.0), (0.5, 0.1), (0.01, 0.8)])
def test_pairs_have_the_value_gradient_and_partition_functions_of_the_plain_formula(
    temperature: float, momentum: float
) -> None:
    inputs = *make_views(24, 8, noise=1.0), torch.tensor(temperature)
    exact, single = leaves(*inputs, dtype=torch.float64), leaves(*inputs)
    logs = torch.cat([some_partitions(24, temperature), -some_partitions(24, temperature).flip(0)], dim=1)
    logs[logs.isinf()] = UNKNOWN
    ids = torch.arange(24) % 23, torch.arange(24) % 22
    settings: dict[str, Any] = {"momentum": momentum, "num_samples": NUM_SAMPLES}
    expected, partitions = plain_gcl_of_pairs(*exact, stored=logs.double().exp(), ids=ids, **settings)
    found, of_batch = of_pairs(single, logs, ids, temperature=single[2], **settings)
    tolerance = 1e-5 if temperature > 0.01 else 3e-5
    assert_close(value_and_gradients(found, single), value_and_gradients(expected, exact), tolerance)
    assert_close([of_batch], [partitions.log()], 1e-5)


def test_an_outdated_partition_function_of_pairs_scales_the_gradient_of_its_row_alone() -> None:
    views, ids = leaves(*make_views(40, 8), dtype=torch.float64), torch.arange(40)
    unknown, weight = torch.full((40, 2), UNKNOWN).double(), torch.ones(40).double()
    settings: dict[str, Any] = {"temperature": 0.1, "num_samples": 500}
    _, of_batch = of_pairs(views, unknown, (ids, ids), momentum=0.0, **settings)
    # u becomes half of the batch's for the first ten rows: 0.6 * u / 6 + 0.4 * u.
    stored = of_batch.clone()
    stored[:10] -= math.log(6)
    weight[:10] = 2
    loss, _ = of_pairs(views, stored, (ids, ids), momentum=0.6, **settings)
    without = clip(*views, temperature=0.1, row_losses=(decoupled, decoupled), weight=weight)
    assert_close(value_and_gradients(loss, views)[1:], value_and_gradients(without, views)[1:], 1e-12)


def test_a_row_without_negatives_has_a_finite_loss_and_no_gradient_from_the_data() -> None:
    views, same = leaves(*make_views(4, 3), dtype=torch.float64), torch.zeros(4, dtype=torch.int64)
    for log in (UNKNOWN, 2.0):
        value, of_batch = gcl(
            *views,
            log_partition=torch.full((4, 1), log),
            temperature=0.1,
            momentum=0.5,
            num_samples=50,
            sample_id=same,
        )
        positives = -(views[0] * views[1]).sum(1).mean() / 0.1
        found, expected = value_and_gradients(value, views), value_and_gradients(positives, views)
        assert found[0].isfinite()
        assert_close(found[1:], expected[1:], 1e-12)
        assert_close([of_batch], [torch.full((4, 1), -10.0)], 1e-6)
        value, of_batch = of_pairs(
            views, torch.full((4, 2), log), (same, same), temperature=0.1, momentum=0.5, num_samples=50
        )
        loss, *gradients = value_and_gradients(value, views)
        assert loss.isfinite() and of_batch.isfinite().all()
        assert not any(each.any() for each in gradients)


def test_a_low_temperature_does_not_overflow() -> None:
    views, ids = leaves(*make_views(20, 4)), torch.arange(20)
    log = torch.full((20, 2), 1_000.0)  # u = e^1000
    settings: dict[str, Any] = {"temperature": 0.001, "momentum": 0.5, "num_samples": 50}
    found = gcl(*views, log_partition=log[:, :1], **settings), of_pairs(views, log, (ids, ids), **settings)
    for value, of_batch in found:
        assert all(each.isfinite().all() for each in (*value_and_gradients(value, views), of_batch))


def test_equal_embeddings_have_the_collapsed_loss() -> None:
    rows, objective = torch.ones(16, 4) / 2, Gcl(temperature=0.1, bank_momentum=0.5, num_samples=100)
    log = torch.full((16, 1), 10.0)
    found, _ = gcl(rows, rows, log_partition=log, temperature=0.1, momentum=0.5, num_samples=100)
    expected = objective.collapsed_loss(batch_size=16, stored=StoreBatch())
    assert found.item() == pytest.approx(expected, rel=1e-5)
    settings: dict[str, Any] = {"temperature": 0.1, "momentum": 0.5, "num_samples": 100}
    found, _ = of_pairs([rows, rows], torch.zeros(16, 2), (torch.arange(16), torch.arange(16)), **settings)
    expected = replace(objective, pairs=True).collapsed_loss(batch_size=16, stored=StoreBatch())
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"log_partition": torch.zeros(9)},
            r"log_partition must be \[9, 1\], got \[9\]; pass the stored log u",
        ),
        ({"log_partition": torch.zeros(8, 1)}, r"must be \[9, 1\], got \[8, 1\]"),
        ({"momentum": 1.0}, r"must be in \[0, 1\), got 1; 0.1 is the paper's"),
        ({"num_samples": 1}, "num_samples must be at least 2, got 1"),
        ({"temperature": 0.0}, "the temperature must be above 0"),
    ],
)
def test_invalid_input_is_refused_in_one_line(changes: dict[str, object], message: str) -> None:
    settings = {"log_partition": torch.zeros(9, 1), "temperature": 0.1, "momentum": 0.5, "num_samples": 50}
    with pytest.raises(ConfigError, match=message) as error:
        gcl(*make_views(9, 4), **settings | changes)  # pyright: ignore[reportArgumentType]
    assert "\n" not in str(error.value)


def test_the_estimates_of_several_pairs_of_views_are_averaged() -> None:
    views = [*make_views(9, 4), make_views(9, 4, noise=0.9)[1]]
    partition = Partition(torch.zeros(9, 1))
    objective = Gcl(temperature=0.1, bank_momentum=0.5, num_samples=50)
    ids, pairs = torch.arange(9), pair_views(views[:2], views[2:])
    mean_over_pairs(objective, pairs, StoreBatch(partition=partition), ExampleIds(query=ids, key=ids))
    settings = {"temperature": 0.1, "log_partition": torch.zeros(9, 1), "momentum": 0.5, "num_samples": 50}
    each = [gcl(views[a], views[b], **settings)[1].exp() for a, b in ((0, 1), (0, 2), (1, 2))]
    assert_close([partition.of_batch().exp()], [torch.stack(each).mean(0)], 1e-6)
