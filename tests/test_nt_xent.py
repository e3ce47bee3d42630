"""NT-Xent: the fused core against the plain formula in float64."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import nt_xent
from tests.embeddings import make_views
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients, wanting
from tests.plain_losses import plain_nt_xent
from tests.tiles import count_products, tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = (1.0, 0.5, 0.1, 0.05, 0.01, 0.005)
SIZES = ((1, 3), (2, 5), (3, 2), (7, 3), (256, 8), (257, 17), (515, 33))


def compare_with_plain(view_a: Tensor, view_b: Tensor, temperature: float) -> Tensor:
    """Compare the value and the gradients of both forms with the plain formula; return its value."""
    tolerance = tolerance_at(temperature)
    # The plain formula subtracts the positive too late, even in float64: 1 - p is off by 1e-16.
    floor = 1e-15 / temperature**2
    degrees = torch.tensor(temperature)
    exact = leaves(view_a, view_b, degrees, dtype=torch.float64)
    plain = value_and_gradients(plain_nt_xent(exact[0], exact[1], exact[2]), exact)
    alone = leaves(view_a, view_b, degrees)
    ours = nt_xent(alone[0], alone[1], temperature=alone[2])
    assert_close(value_and_gradients(ours, alone), plain, tolerance, floor)
    wide = leaves(view_a, view_b, degrees)
    gathered = nt_xent(*wide[:2], temperature=wide[2], gathered_a=wide[0] * 1, gathered_b=wide[1] * 1)
    assert_close(value_and_gradients(gathered, wide), plain, tolerance, floor)
    return plain[0]


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize(("batch", "dim"), SIZES)
def test_tiled_loss_and_gradients_equal_the_plain_formula(batch: int, dim: int, temperature: float) -> None:
    compare_with_plain(*make_views(batch, dim), temperature)


def test_many_tiles_equal_the_plain_formula() -> None:
    compare_with_plain(*make_views(1050, 6), 0.1)
    compare_with_plain(*make_views(1050, 6), 0.01)


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_unrelated_views_neither_overflow_nor_underflow(temperature: float) -> None:
    """The best similarity is far below 1, so exp((similarity - 1) / 0.005) is zero."""
    value = compare_with_plain(*make_views(300, 128, noise=100.0), temperature)
    assert value.isfinite()


@pytest.mark.parametrize("temperature", (0.1, 0.05, 0.04))
def test_loss_near_zero_is_not_rounded_away(temperature: float) -> None:
    view = torch.eye(40)
    nearly = F.normalize(view + 1e-3, dim=1)
    value = compare_with_plain(view, nearly, temperature)
    assert 0 < value < 1e-2


def test_equal_views_at_a_low_temperature_give_a_tiny_exact_loss() -> None:
    view = torch.eye(16)
    value = nt_xent(view, view, temperature=0.02)
    true = torch.log1p(30 * torch.exp(torch.tensor(-50.0, dtype=torch.float64)))
    assert value.item() == pytest.approx(true.item(), rel=1e-4)


@pytest.mark.parametrize("length", (1e-3, 0.2, 30.0))
def test_rows_of_any_norm_give_the_exact_value(length: float) -> None:
    view_a, view_b = make_views(270, 9)
    lengths = length * torch.linspace(0.5, 1.5, 270)[:, None]
    # Longer rows act as a lower temperature: 0.5 keeps the largest case meaningful in float32.
    view_a, view_b = lengths * view_a, lengths * view_b
    exact = plain_nt_xent(view_a.double(), view_b.double(), torch.tensor(0.5))
    assert_close([nt_xent(view_a, view_b, temperature=0.5)], [exact], 1e-5)
    wide = nt_xent(view_a, view_b, temperature=0.5, gathered_a=view_a, gathered_b=view_b)
    assert_close([wide], [exact], 1e-5)


def test_one_short_row_among_long_ones_does_not_underflow() -> None:
    view_a, view_b = make_views(20, 4)
    view_a[0] *= 1e-4
    view_b[1:] *= 100.0
    exact = plain_nt_xent(view_a.double(), view_b.double(), torch.tensor(0.5))
    assert_close([nt_xent(view_a, view_b, temperature=0.5)], [exact], 1e-5)


def test_float64_rows_are_computed_in_float64() -> None:
    inputs = [*make_views(5, 3), torch.tensor(0.07)]
    exact = leaves(*inputs, dtype=torch.float64)
    ours = value_and_gradients(nt_xent(exact[0], exact[1], temperature=exact[2]), exact)
    assert_close(ours, value_and_gradients(plain_nt_xent(exact[0], exact[1], exact[2]), exact), 1e-13)
    as_float = nt_xent(exact[0], exact[1], temperature=0.07)
    as_tensor = torch.tensor(0.07, dtype=torch.float64)
    assert_close([as_float], [plain_nt_xent(exact[0], exact[1], as_tensor)], 1e-14)


def test_each_worker_has_the_plain_loss_and_gradients_of_local_and_gathered_rows() -> None:
    gathered_a, gathered_b = make_views(600, 5)
    start, stop = 130, 417
    inputs = leaves(gathered_a[start:stop], gathered_b[start:stop], gathered_a, gathered_b)
    exact = leaves(*inputs, dtype=torch.float64)
    ids = torch.arange(600) % 550
    gathered: dict[str, Any] = {"gathered_a": inputs[2], "gathered_b": inputs[3], "offset": start}
    ours = nt_xent(
        *inputs[:2],
        temperature=0.1,
        sample_id=ids[start:stop],
        gathered_sample_id=ids,
        **gathered,
    )
    own = ids[start:stop], ids
    plain = plain_nt_xent(exact[0], exact[1], torch.tensor(0.1), exact[2], exact[3], offset=start, ids=own)
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(plain, exact), 1e-5)


@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_candidates_with_the_same_id_are_masked(temperature: float) -> None:
    ids = torch.arange(700) % 50
    views = make_views(700, 9)
    degrees = torch.tensor(temperature, dtype=torch.float64)
    exact = leaves(*views, dtype=torch.float64)
    plain = value_and_gradients(plain_nt_xent(exact[0], exact[1], degrees, ids=(ids, ids)), exact)
    alone = leaves(*views)
    ours = nt_xent(*alone, temperature=temperature, sample_id=ids)
    assert_close(value_and_gradients(ours, alone), plain, tolerance_at(temperature))
    unmasked = nt_xent(*alone, temperature=temperature)
    assert unmasked - ours > 1e-3


def test_only_inputs_that_require_a_gradient_get_one() -> None:
    view_a, view_b = make_views(9, 4)
    degrees = torch.tensor(0.1, requires_grad=True)
    nt_xent(view_a, view_b, temperature=degrees).backward()
    assert degrees.grad is not None
    (only_a,) = leaves(view_a)
    both = leaves(view_a, view_b)
    nt_xent(only_a, view_b, temperature=0.1).backward()
    nt_xent(*both, temperature=0.1).backward()
    assert only_a.grad is not None
    assert both[0].grad is not None
    assert torch.equal(only_a.grad, both[0].grad)


def test_only_tiles_on_and_above_the_diagonal_are_computed() -> None:
    """Four spans have ten such tiles; the gradient needs them again, and each of six for two spans."""
    inputs = make_views(4, 5)
    with tiny_tiles_in("views"):
        for wanted, num_products in (((), 10), ((0,), 10 + 10 + 16)):
            loss = partial(nt_xent, *wanting(inputs, wanted), temperature=0.1)
            assert count_products(loss, "mutual") == num_products


def test_loss_is_the_mean_over_the_rows_of_both_views() -> None:
    """Among equal rows all candidates are equally likely: log(2 * batch - 1)."""
    view = F.normalize(torch.ones(8, 4), dim=1)
    value = nt_xent(view, view, temperature=0.5)
    assert value.item() == pytest.approx(torch.tensor(15.0).log().item(), rel=1e-6)
    assert "mean" in (nt_xent.__doc__ or "")


ROWS = torch.eye(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0; usual values"),
        ({"temperature": torch.tensor(-0.5)}, "must be above 0, got -0.5; usual values"),
        ({"temperature": torch.ones(1)}, "must be a scalar, got shape [1]; pass a float"),
        ({"view_b": ROWS[:3]}, "got [4, 4] and [3, 4]; pass one row per sample"),
        ({"view_a": ROWS[0], "view_b": ROWS[0]}, "got [4] and [4]; pass one row"),
        ({"view_a": ROWS[:0], "view_b": ROWS[:0]}, "got [0, 4] and [0, 4]; pass"),
        ({"sample_id": torch.arange(5)}, "got [5] ids for 4 rows; pass one id per row"),
        ({"gathered_a": ROWS}, "gathered_b is None; gather both or neither"),
        (
            {"gathered_a": ROWS, "gathered_b": ROWS[:2]},
            "must be [batch, 4] of one batch, got [4, 4] and [2, 4]; gather",
        ),
        (
            {"gathered_a": ROWS[:, :2], "gathered_b": ROWS[:, :2]},
            "must be [batch, 4] of one batch, got [4, 2] and [4, 2]",
        ),
        ({"gathered_a": ROWS, "gathered_b": ROWS, "offset": 1}, "offset 1 with 4 rows for 4"),
        ({"gathered_a": ROWS, "gathered_b": ROWS, "offset": -1}, "offset -1 with 4 rows"),
        (
            {"gathered_a": ROWS, "gathered_b": ROWS, "sample_id": torch.arange(4)},
            "gathered_sample_id is None; pass both or neither",
        ),
        (
            {
                "gathered_a": ROWS,
                "gathered_b": ROWS,
                "sample_id": torch.arange(4),
                "gathered_sample_id": torch.arange(3),
            },
            "got [3] ids for 4 rows; gather the ids",
        ),
    ],
)
def test_invalid_input_is_refused_with_the_value_and_a_remedy(changes: dict[str, Any], message: str) -> None:
    arguments = {"view_a": ROWS, "view_b": ROWS, "temperature": 0.1} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        nt_xent(**arguments)
