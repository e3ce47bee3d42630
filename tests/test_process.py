"""How a worker's process multiplies: faster where it can, never less exactly."""

from collections.abc import Iterator

import pytest
import torch

from raycl.training import process
from raycl.training.process import multiply_by_onednn, prepare_process

PRODUCTS = torch.backends.mkldnn.matmul


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before, num_threads = PRODUCTS.fp32_precision, torch.get_num_threads()
    yield
    PRODUCTS.fp32_precision = before
    torch.set_num_threads(num_threads)


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("size", [1, 7, 100, 1_000])
def test_a_prepared_process_multiplies_with_gradients_as_exactly_as_float32_can(size: int) -> None:
    prepare_process(1)
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(96, size), torch.randn(300, 96, requires_grad=True)
    layer(rows).square().sum().backward()
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    exact = rows.detach().double() @ weight.T + bias
    assert relative_error(layer(rows).detach(), exact) < 1e-6
    assert rows.grad is not None
    assert relative_error(rows.grad, 2 * exact @ weight) < 1e-6
    assert layer.weight.grad is not None
    assert relative_error(layer.weight.grad, 2 * exact.T @ rows.detach().double()) < 1e-6


def test_exact_products_are_onednns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_product_error", lambda shape: 3e-7)
    PRODUCTS.fp32_precision = "ieee"
    assert multiply_by_onednn()
    assert PRODUCTS.fp32_precision == "bf16"


def test_products_that_would_be_rounded_are_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a processor with units for matrices of bfloat16.
    rounded = process._product_error
    monkeypatch.setattr(process, "_product_error", lambda shape: 3e-3 if len(shape) > 2 else rounded(shape))
    PRODUCTS.fp32_precision = "ieee"
    assert not multiply_by_onednn()
    assert PRODUCTS.fp32_precision == "ieee"


def test_the_error_of_a_product_tells_bfloat16_from_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(process._product_error(shape) < process._EXACT / 10 for shape in process._TRIED)
    multiply = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype == torch.float64:
            return multiply(left, right)
        return multiply(left.bfloat16(), right.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert all(process._product_error(shape) > 10 * process._EXACT for shape in process._TRIED)


@pytest.mark.parametrize("is_amd", [True, False])
def test_only_a_processor_on_which_mkl_is_slow_is_taken_from_it(
    is_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(process, "_is_amd", lambda: is_amd)
    monkeypatch.setattr(process, "multiply_by_onednn", lambda: asked.append(True))
    prepare_process(1)
    assert asked == [True] * is_amd
