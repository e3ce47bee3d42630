"""The loss of any number of views of a sample against its formula in float64; workers in workers/test_objectives.py."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.losses import nt_xent, poly_view
from raycl.losses.objective import StoreBatch
from raycl.losses.poly_view import PolyView
from raycl.recipes import recipe
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients
from tests.plain_losses import plain_poly_view
from tests.tiles import tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")
MEANS = ("geometric", "arithmetic")


def make_inputs(num_views: int, batch: int, dim: int = 5, *, temperature: float = 0.1) -> list[Tensor]:
    """Return views and a temperature in float64."""
    generator = torch.Generator().manual_seed(num_views)
    sample = torch.randn(batch, dim, generator=generator)
    views = [
        F.normalize(sample + torch.randn(batch, dim, generator=generator), dim=1) for _ in range(num_views)
    ]
    return leaves(*views, torch.tensor(temperature), dtype=torch.float64)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_views=st.integers(2, 4),
    batch=st.integers(1, 5),
    before=st.integers(0, 3),
    after=st.integers(0, 3),
    num_ids=st.integers(1, 12),
    temperature=st.sampled_from((1.0, 0.1, 0.02)),
    mean=st.sampled_from(MEANS),
)
def test_any_sizes_and_ids_equal_the_plain_formula(
    num_views: int, batch: int, before: int, after: int, num_ids: int, temperature: float, mean: str
) -> None:
    total, own = before + batch + after, slice(before, before + batch)
    *views, degrees = inputs = make_inputs(num_views, total, temperature=temperature)
    sample_id = torch.arange(total) % num_ids
    gathered: dict[str, Any] = {}
    if before + after:
        gathered = {"gathered_views": views, "gathered_sample_id": sample_id, "offset": before}
    with tiny_tiles_in("softmax"):
        ours = poly_view(
            [view[own] for view in views],
            temperature=degrees,
            mean=mean,
            sample_id=sample_id[own],
            **gathered,
        )
    places = [view * total + row for view in range(num_views) for row in range(total)[own]]
    true = plain_poly_view(views, degrees, mean=mean, ids=sample_id, own=places)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-9, 1e-11)


@pytest.mark.parametrize("mean", MEANS)
@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_many_tiles_in_single_precision_equal_the_plain_formula(temperature: float, mean: str) -> None:
    exact = make_inputs(3, 180, temperature=temperature)  # 540 rows: more than a tile
    inputs = leaves(*exact, dtype=torch.float32)
    ours = poly_view(inputs[:3], temperature=inputs[3], mean=mean)
    true = value_and_gradients(plain_poly_view(exact[:3], exact[3], mean=mean), exact)
    assert_close(value_and_gradients(ours, inputs), true, tolerance_at(temperature))


@pytest.mark.parametrize("mean", MEANS)
def test_two_views_give_nt_xent(mean: str) -> None:
    view_a, view_b, temperature = inputs = make_inputs(2, 40)
    sample_id = torch.arange(40) % 30
    ours = poly_view([view_a, view_b], temperature=temperature, mean=mean, sample_id=sample_id)
    expected = nt_xent(view_a, view_b, temperature=temperature, sample_id=sample_id)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(expected, inputs), 1e-12)


def test_the_arithmetic_mean_costs_less_unless_all_positives_are_equally_likely() -> None:
    *views, temperature = make_inputs(4, 20)
    geometric, arithmetic = (poly_view(views, temperature=temperature, mean=mean) for mean in MEANS)
    assert arithmetic < geometric - 0.1
    same = [poly_view([views[0]] * 4, temperature=temperature, mean=mean) for mean in MEANS]
    assert_close(same[:1], same[1:], 1e-12)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize("mean", MEANS)
def test_half_precision_rows_lose_only_their_own_rounding(mean: str, dtype: torch.dtype) -> None:
    half = leaves(*make_inputs(3, 50, 6)[:3], dtype=dtype)
    exact = leaves(*half, dtype=torch.float64)
    true = value_and_gradients(plain_poly_view(exact, torch.tensor(0.1), mean=mean), exact)
    value = poly_view(half, temperature=0.1, mean=mean)
    assert value.dtype == torch.float32
    assert_close([value], true[:1], 1e-5)
    assert_close(list(torch.autograd.grad(value, half)), true[1:], 5e-3)


@pytest.mark.parametrize("mean", MEANS)
def test_a_batch_of_one_sample_has_no_negatives_and_no_gradient(mean: str) -> None:
    inputs = make_inputs(3, 4)[:3]
    value = poly_view(inputs, temperature=0.1, mean=mean, sample_id=torch.zeros(4, dtype=torch.int64))
    assert all(each.abs().max() == 0 for each in value_and_gradients(value, inputs))


@pytest.mark.parametrize("mean", MEANS)
def test_equal_embeddings_have_the_collapsed_loss(mean: str) -> None:
    objective = PolyView(temperature=0.1, view_mean=mean, num_views=3)
    expected = objective.collapsed_loss(batch_size=16, stored=StoreBatch())
    assert expected == math.log(46)
    found = poly_view([torch.ones(16, 4) / 2] * 3, temperature=0.1, mean=mean)
    assert found.item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"views": [torch.eye(4)]}, "poly_view compares the views of each sample, got 1; pass two or more"),
        ({"mean": "harmonic"}, "'harmonic' is not a mean of poly_view; choose geometric or arithmetic"),
        ({"views": [torch.eye(4)] * 2 + [torch.eye(4)[:3]]}, "all views must be"),
        ({"temperature": 0.0}, "the temperature must be above 0, got 0"),
        ({"sample_id": torch.arange(3)}, "sample_id does not match its rows: got .3. ids for 4 rows"),
        ({"offset": 2}, "got offset 2 with 4 rows for 4 gathered rows"),
        ({"gathered_views": [torch.eye(4)]}, "got 1 gathered_views for 3 views; gather each of them"),
        (
            {"gathered_views": [torch.eye(4)] * 2 + [torch.eye(5)]},
            "gathered_views.0. and gathered_views.1. and gathered_views.2. must be",
        ),
        ({"gathered_sample_id": torch.arange(4)}, "gathered_sample_id requires gathered_views"),
        (
            {"gathered_views": [torch.eye(4)] * 3, "sample_id": torch.arange(4)},
            "gathered_sample_id is None; pass both",
        ),
    ],
)
def test_invalid_input_is_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"views": [torch.eye(4)] * 3, "temperature": 0.1}
    with pytest.raises(ConfigError, match=message):
        poly_view(**(arguments | changes))


def of_views(name: str, **changes: Any) -> RunConfig:
    return override(recipe(name, image_size=32), {"stages.0.loss": "poly_view", **changes})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("moco_v2", {}, "loss poly_view is incompatible with key momentum_encoder and negatives.store queue"),
        ("two_tower", {"negatives.explicit": False}, "loss poly_view compares views of one sample"),
        ("simclr", {"stages.0.view_mean": "arithmetic"}, "view_mean acts only with three or more views"),
        (
            "simclr",
            {"stages.0.loss": "dcl", "augment.views": [{"count": 3}], "stages.0.view_mean": "arithmetic"},
            "view_mean acts only with loss poly_view",
        ),
        ("simclr", {"stages.0.hinge_weight": 0.5}, "hinge_weight acts only with loss"),
    ],
)
def test_a_run_without_a_use_for_it_is_refused(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        of_views(name, **changes)
