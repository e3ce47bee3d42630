"""The benchmark of a million pairs, on a small batch: its reference, and the errors that it finds."""

import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import million_pairs  # pyright: ignore[reportMissingImports]

from raycl.losses import tiled
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.plain_losses import plain_bidirectional, plain_siglip
from tests.workers.processes import run_workers

LOCAL = 1_100  # more rows and columns than a tile of the reference has


def compare(rank: int, num_workers: int, loss: str) -> dict[str, float]:
    return million_pairs.compare(loss, 60, 8)


def count_products(rank: int, num_workers: int, loss: str) -> float:
    """Return the products of a step, each of which is one tile, between this worker's rows and all rows."""
    with patch.object(tiled, "product", wraps=tiled.product) as products:
        million_pairs.take_step(loss, 60)
    return products.call_count / num_workers


def reference(
    rank: int, num_workers: int, loss: str, exact_pairs: int
) -> tuple[dict[str, float], tuple[torch.Tensor, ...]]:
    with patch.object(million_pairs, "EXACT_PAIRS", exact_pairs):
        return million_pairs.REFERENCES[loss](LOCAL, torch.arange(0, LOCAL, 100))


@pytest.mark.parametrize("loss", million_pairs.REFERENCES)
def test_a_step_has_small_errors_on_every_worker(loss: str) -> None:
    for line in run_workers(compare, 3, loss):
        errors = [value for name, value in line.items() if name.endswith("_error")]
        assert len(errors) == (6 if loss == "clip" else 5)
        assert 0 < max(errors) < 1e-5
        assert line["wall_s"] > 0
        assert line["peak_mb"] > 0


@pytest.mark.parametrize("loss", million_pairs.REFERENCES)
def test_a_step_takes_as_many_matrix_products_as_the_progress_says(loss: str) -> None:
    assert run_workers(count_products, 3, loss) == [million_pairs.PRODUCTS[loss]] * 3


@pytest.mark.parametrize(("exact_pairs", "tolerance"), [(2**18, 1e-9), (0, 1e-4)])
@pytest.mark.parametrize("loss", million_pairs.REFERENCES)
def test_the_reference_equals_the_plain_formula_on_the_whole_batch(
    loss: str, exact_pairs: int, tolerance: float
) -> None:
    pairs = [million_pairs.make_pairs(rank, LOCAL) for rank in range(2)]
    inputs = leaves(*(torch.cat(side) for side in zip(*pairs, strict=True)), dtype=torch.float64)
    temperature = torch.tensor(million_pairs.TEMPERATURES[loss]).double()
    if loss == "clip":
        value = plain_bidirectional(*inputs, temperature, inputs[0][:0])
    else:
        value = plain_siglip(*inputs, temperature, torch.tensor(million_pairs.BIAS).double())
    expected, *gradients = value_and_gradients(value, inputs)
    for rank, (line, sampled) in enumerate(run_workers(reference, 2, loss, exact_pairs)):
        own = slice(rank * LOCAL, (rank + 1) * LOCAL)
        assert_close(
            [torch.tensor(line["value"], dtype=torch.float64), *sampled],
            [expected, *(each[own][::100] for each in gradients)],
            tolerance,
        )


def test_unequal_shares_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["million_pairs.py", "--pairs", "1001"])
    with pytest.raises(SystemExit):
        million_pairs.read_options()
    assert "--pairs must be a multiple of the 4 workers" in capsys.readouterr().err
