"""The value of a loss and its gradients: taken, and compared with the true ones."""

from collections.abc import Container, Sequence

import torch
from torch import Tensor


def leaves(*tensors: Tensor, dtype: torch.dtype | None = None) -> list[Tensor]:
    return [tensor.detach().clone().to(dtype=dtype).requires_grad_() for tensor in tensors]


def wanting(inputs: Sequence[Tensor], wanted: Container[int]) -> list[Tensor]:
    """Return the inputs anew, of which those with these numbers want a gradient."""
    return [tensor.clone().requires_grad_(k in wanted) for k, tensor in enumerate(inputs)]


def value_and_gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    return [loss.detach(), *torch.autograd.grad(loss, inputs)]


def assert_close(ours: list[Tensor], plain: list[Tensor], tolerance: float, floor: float = 1e-15) -> None:
    """Compare each tensor as a whole: its error's norm relative to the true norm."""
    for mine, true in zip(ours, plain, strict=True):
        error = (mine.double() - true.double()).norm()
        assert error <= tolerance * true.double().norm() + floor, f"{error:g} of {true.norm():g}"


def assert_zero(results: list[Tensor]) -> None:
    """Find neither a loss nor a gradient."""
    for result in results:
        assert torch.equal(result, torch.zeros_like(result))


def tolerance_at(temperature: float) -> float:
    # A float32 logit is wrong by about 1e-7 / temperature, and so is what follows from it.
    return 1e-6 + 3e-6 / temperature
