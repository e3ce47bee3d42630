"""Computing the value and gradients of a loss, and comparing them with the expected ones."""

from collections.abc import Container, Sequence

import torch
from torch import Tensor


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().clone().to(dtype=dtype).requires_grad_() for tensor in tensors]


def wanting(inputs: Sequence[Tensor], wanted: Container[int]) -> list[Tensor]:
    """Return copies of the inputs; the ones at these indices require a gradient."""
    return [tensor.clone().requires_grad_(k in wanted) for k, tensor in enumerate(inputs)]


def value_and_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_close(ours: list[Tensor], plain: list[Tensor], tolerance: float, floor: float = 1e-15) -> None:
    """Compare the norm of each tensor's error with the norm of the expected tensor."""
    for mine, true in zip(ours, plain, strict=True):
        error = (mine.double() - true.double()).norm()
        assert error <= tolerance * true.double().norm() + floor, f"{error:g} of {true.norm():g}"


def assert_zero(results: list[Tensor]) -> None:
    """Assert that the loss and all gradients are zero."""
    for result in results:
        assert torch.equal(result, torch.zeros_like(result))


def tolerance_at(temperature: float) -> float:
    # A float32 logit has an error of about 1e-7 / temperature, which propagates.
    return 1e-6 + 3e-6 / temperature
