"""The metrics of embeddings, against formulas in float64 and known values."""

import math
import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from raycl.errors import ConfigError
from raycl.evaluation.embedding_metrics import (
    MAX_ROWS,
    alignment,
    effective_rank,
    embedding_std,
    measure,
    positive_negative_gap,
    uniformity,
)
from tests.tiles import MetricsLogger

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = ((2, 3), (3, 2), (17, 5), (40, 64), (257, 8), (600, 33))
BAD_ROWS = (torch.zeros(3), torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(2, 3, 4))


def make_rows(num_rows: int, dim: int, seed: int = 0) -> Tensor:
    return F.normalize(torch.randn(num_rows, dim, generator=torch.Generator().manual_seed(seed)), dim=1)


def make_pair(num_rows: int, dim: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    query = make_rows(num_rows, dim, seed)
    return query, F.normalize(query + 0.5 * make_rows(num_rows, dim, seed + 1), dim=1)


def point(num_rows: int, dim: int) -> Tensor:
    return make_rows(1, dim).repeat(num_rows, 1)


def plain_alignment(query: Tensor, key: Tensor) -> float:
    """Compute alignment one pair at a time."""
    query, key = query.double(), key.double()
    return sum(float(((a - b) ** 2).sum()) for a, b in zip(query, key, strict=True)) / len(query)


def plain_uniformity(rows: Tensor) -> float:
    """Compute uniformity over the pairs above the diagonal."""
    distances = torch.pdist(rows.double())
    return math.log(float((-2 * distances**2).exp().mean()))


def plain_effective_rank(rows: Tensor) -> float:
    """Compute the effective rank from the singular values of the rows."""
    singular = torch.linalg.svdvals(rows.double())
    share = singular / singular.sum()
    return math.exp(-sum(float(p) * math.log(float(p)) for p in share if p > 0))


def plain_std(rows: Tensor) -> float:
    """Compute the standard deviation of each dim."""
    rows = rows.double()
    deviations = [float(((column - column.mean()) ** 2).mean().sqrt()) for column in rows.T]
    return sum(deviations) / len(deviations) * math.sqrt(rows.shape[1])


def plain_gap(query: Tensor, key: Tensor) -> float:
    """Compute the gap from the full similarity matrix."""
    similarity = query.double() @ key.double().T
    own = torch.eye(len(query), dtype=torch.bool)
    return float(similarity[own].mean() - similarity[~own].mean())


@pytest.mark.parametrize(("num_rows", "dim"), SHAPES)
def test_every_metric_equals_its_formula_in_float64(num_rows: int, dim: int) -> None:
    query, key = make_pair(num_rows, dim)
    for found, expected in (
        (alignment(query, key), plain_alignment(query, key)),
        (uniformity(query), plain_uniformity(query)),
        (effective_rank(query), plain_effective_rank(query)),
        (embedding_std(query), plain_std(query)),
        (positive_negative_gap(query, key), plain_gap(query, key)),
    ):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-5)


def test_metrics_are_exact_in_a_narrow_cone() -> None:
    query = F.normalize(point(200, 32) + 1e-2 * make_rows(200, 32, 5), dim=1)
    key = F.normalize(query + 1e-3 * make_rows(200, 32, 6), dim=1)
    assert embedding_std(query) == pytest.approx(plain_std(query), rel=1e-4)
    assert alignment(query, key) == pytest.approx(plain_alignment(query, key), rel=1e-4)
    assert effective_rank(query) == pytest.approx(plain_effective_rank(query), rel=1e-4)
    assert positive_negative_gap(query, key) == pytest.approx(plain_gap(query, key), abs=1e-6)
    assert uniformity(query) == pytest.approx(plain_uniformity(query), abs=1e-6)


def test_uniform_rows_on_the_sphere_have_std_1_full_rank_and_low_uniformity() -> None:
    rows = make_rows(20_000, 16)
    assert embedding_std(rows) == pytest.approx(1.0, abs=0.01)
    assert effective_rank(rows) == pytest.approx(16, rel=0.01)
    # log E exp(-4 + 4 * similarity): the exponent has mean -4 and variance 16 / dim, which adds 8 / dim.
    assert uniformity(rows[:4000]) == pytest.approx(-4 + 8 / 16, abs=0.05)


def test_rows_at_one_point_have_std_0_rank_1_and_uniformity_0() -> None:
    rows = point(50, 24)
    assert embedding_std(rows) == pytest.approx(0.0, abs=1e-6)
    assert effective_rank(rows) == pytest.approx(1.0, abs=1e-4)
    assert uniformity(rows) == pytest.approx(0.0, abs=1e-5)
    assert positive_negative_gap(rows, rows) == pytest.approx(0.0, abs=1e-6)
    assert alignment(rows, rows) == 0.0


def test_rank_is_computed_without_centering_and_ignores_rounding() -> None:
    rows = F.normalize(point(100, 16) + 1e-3 * make_rows(100, 16, 9), dim=1)
    assert effective_rank(rows) < 1.2
    assert effective_rank(rows - rows.mean(0)) > 14
    rounded = F.normalize(point(256, 512) * torch.linspace(0.3, 3.0, 256)[:, None], dim=1)
    assert not torch.equal(rounded[0], rounded[100])
    assert effective_rank(rounded) == pytest.approx(1.0, abs=1e-3)


def test_one_row_gives_the_metrics_of_a_point() -> None:
    query, key = make_pair(1, 8)
    assert measure(query, key).known() == {
        "num_rows": 1,
        "dim": 8,
        "uniformity": 0.0,
        "effective_rank": pytest.approx(1.0),
        "embedding_std": 0.0,
        "alignment": pytest.approx(plain_alignment(query, key)),
        "positive_negative_gap": 0.0,
    }


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("num_rows", [1, 2, 5])
def test_degenerate_rows_give_finite_metrics(num_rows: int, value: float) -> None:
    rows = torch.full((num_rows, 4), value)
    figures = measure(rows, rows).known()
    assert all(math.isfinite(figure) for figure in figures.values())
    assert figures["effective_rank"] == 1.0
    assert figures["embedding_std"] == figures["alignment"] == figures["positive_negative_gap"] == 0.0


def test_rows_of_any_length_have_the_metrics_of_their_directions() -> None:
    query, key = make_pair(60, 8)
    lengths = torch.linspace(0.01, 90, 60)[:, None]
    found, expected = measure(query * lengths, key * lengths.flip(0)), measure(query, key)
    assert found.known() == pytest.approx(expected.known(), rel=1e-5)


def test_a_row_with_nan_does_not_affect_the_metrics_of_other_rows() -> None:
    rows = make_rows(9, 4)
    rows[3, 2] = math.nan
    cleaned = rows.clone()
    cleaned[3, 2] = 0.0
    assert measure(rows, rows) == measure(cleaned, cleaned)


def test_measure_returns_query_metrics_only_without_keys() -> None:
    query, key = make_pair(100, 24)
    alone = {
        "num_rows": 100,
        "dim": 24,
        "uniformity": uniformity(query),
        "effective_rank": effective_rank(query),
        "embedding_std": embedding_std(query),
    }
    paired = {"alignment": alignment(query, key), "positive_negative_gap": positive_negative_gap(query, key)}
    assert measure(query, key).known() == pytest.approx(alone | paired, rel=1e-5)
    assert measure(query).known() == pytest.approx(alone, rel=1e-5)
    assert measure(query).positive_negative_gap is None
    assert {type(figure) for figure in measure(query, key).known().values()} == {int, float}


def test_measure_uses_only_the_first_rows() -> None:
    query, key = make_pair(MAX_ROWS + 50, 8)
    assert measure(query, key) == measure(query[:MAX_ROWS], key[:MAX_ROWS])
    assert measure(query[:-50], key[:-50]) != measure(query[: MAX_ROWS - 1], key[: MAX_ROWS - 1])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_metrics_are_computed_in_float32_under_autocast_without_changing_rows(dtype: torch.dtype) -> None:
    query, key = (rows.to(dtype) for rows in make_pair(60, 16))
    query.requires_grad_()
    before = query.detach().clone(), key.clone()
    expected = measure(query.float(), key.float())
    assert measure(query, key) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert measure(query, key) == expected
    assert torch.equal(query, before[0])
    assert torch.equal(key, before[1])
    assert query.grad is None


def test_uniformity_never_allocates_all_pairs_at_once() -> None:
    rows = make_rows(2000, 4)
    with MetricsLogger() as recorder:
        uniformity(rows)
    assert recorder.largest <= 256 * 2000


@pytest.mark.parametrize("rows", BAD_ROWS, ids=lambda rows: str(list(rows.shape)))
def test_tensors_of_invalid_shape_are_refused(rows: Tensor) -> None:
    with pytest.raises(ConfigError, match=rf"{re.escape(str(list(rows.shape)))}; pass one embedding per row"):
        measure(rows)


def test_keys_that_do_not_match_the_queries_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"\[5, 4\] for \[6, 4\]; pass one key"):
        measure(make_rows(6, 4), make_rows(5, 4))
    with pytest.raises(ConfigError, match=r"\[6, 5\] for \[6, 4\]"):
        measure(make_rows(6, 4), make_rows(6, 5))
