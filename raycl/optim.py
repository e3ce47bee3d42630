"""Optimizers without weight decay of biases and normalization weights, and schedules from step to value."""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from raycl.errors import ConfigError

Schedule = Callable[[int], float]


def build_optimizer(
    name: Literal["sgd", "adamw", "lars"],
    module: nn.Module,
    *,
    momentum: float = 0.9,
    betas: tuple[float, float] = (0.9, 0.999),
    weight_decay: float = 0.0,
    trust_coefficient: float = 1e-3,
    learning_rate_scales: Mapping[nn.Parameter, float] | None = None,
) -> Optimizer:
    """Build an optimizer for ``module``; the learning rate is set at every step.

    Biases and normalization weights (all parameters with fewer than two dimensions) have no weight
    decay and no LARS scaling, as in SimCLR. ``learning_rate_scales`` multiply the learning rate of a
    parameter, 1 if it is missing.
    """
    scales, grouped = learning_rate_scales or {}, defaultdict[tuple[bool, float], list[nn.Parameter]](list)
    for parameter in module.parameters():
        if parameter.requires_grad:
            grouped[parameter.ndim <= 1, scales.get(parameter, 1.0)].append(parameter)
    groups: list[dict[str, Any]] = [
        {
            "params": parameters,
            "weight_decay": 0.0 if is_vector else weight_decay,
            "adapt": not is_vector,
            "lr_scale": scale,
        }
        for (is_vector, scale), parameters in sorted(grouped.items())
    ]
    if name == "adamw":
        return AdamW(groups, lr=0.0, betas=betas, fused=True)
    if name == "sgd":
        return SGD(groups, lr=0.0, momentum=momentum, fused=True)
    return LARS(groups, momentum=momentum, trust_coefficient=trust_coefficient)


def set_learning_rate(optimizer: Optimizer, value: float) -> None:
    """Set the learning rate of all parameter groups, each by its scale."""
    for group in optimizer.param_groups:
        group["lr"] = value * group.get("lr_scale", 1.0)  # checkpoints of earlier versions have none


def clip_gradient(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scale the gradient of all parameters to an L2 norm of at most ``max_norm``, as torch's ``clip_grad_norm_``.

    Returns the norm before, a scalar on the device of the parameters, without waiting for it. An infinite
    gradient becomes NaN.
    """
    parameters = (each for group in optimizer.param_groups for each in group["params"])
    gradients = [each.grad for each in parameters if each.grad is not None]
    norm = torch.stack(torch._foreach_norm(gradients)).norm()
    torch._foreach_mul_(gradients, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm


@final
class LARS(Optimizer):
    """SGD with steps scaled by the ratio of weight norm to gradient norm (You et al., 2017)."""

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        *,
        lr: float = 0.0,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 1e-3,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": True,
        }
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Perform one step; closures are not supported."""
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)

    def _step_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        gradients: list[Tensor] = [p.grad for p in parameters if p.grad is not None]
        if group["weight_decay"]:
            gradients = list(torch._foreach_add(gradients, parameters, alpha=group["weight_decay"]))
        if group["adapt"]:
            gradients = _adapted(parameters, gradients, group["trust_coefficient"])
        buffers = [self.state[p].setdefault("momentum_buffer", torch.zeros_like(p)) for p in parameters]
        torch._foreach_mul_(buffers, group["momentum"])
        torch._foreach_add_(buffers, gradients)
        torch._foreach_add_(parameters, buffers, alpha=-group["lr"])


def _adapted(parameters: list[Tensor], gradients: list[Tensor], trust_coefficient: float) -> list[Tensor]:
    """Scale each gradient by trust_coefficient * |weight| / |gradient|, where both norms are nonzero."""
    of_weights, of_gradients = (torch.stack(torch._foreach_norm(each)) for each in (parameters, gradients))
    are_given = (of_weights > 0) & (of_gradients > 0)
    ratios = torch.where(are_given, trust_coefficient * of_weights / of_gradients, 1.0)
    return list(torch._foreach_mul(gradients, list(ratios.unbind())))


def constant(value: float) -> Schedule:
    """Return ``value`` at every step."""
    return lambda step: value


def linear(start: float, end: float, *, num_steps: int) -> Schedule:
    """Interpolate linearly from ``start`` to ``end`` over ``num_steps``, then stay at ``end``."""
    if num_steps <= 0:
        return constant(end)
    return lambda step: start + (end - start) * _progress(step, num_steps)


def cosine(start: float, end: float, *, num_steps: int) -> Schedule:
    """Decay from ``start`` to ``end`` along half a cosine, then stay (Loshchilov & Hutter, 2017)."""
    if num_steps <= 0:
        return constant(end)
    return lambda step: end + (start - end) * 0.5 * (1.0 + math.cos(math.pi * _progress(step, num_steps)))


def step_down(start: float, *, factor: float, steps: Sequence[int]) -> Schedule:
    """Start at ``start``, and multiply the value by ``factor`` at each of ``steps``."""
    return lambda step: start * factor ** sum(step >= each for each in steps)


def join(schedules: Sequence[Schedule], *, boundaries: Sequence[int]) -> Schedule:
    """Concatenate schedules; each counts its steps from its own boundary.

    Raises ``ConfigError`` unless the boundaries ascend, with one between each two schedules.
    """
    if len(boundaries) != len(schedules) - 1 or any(a > b for a, b in pairwise(boundaries)):
        raise ConfigError(
            f"boundaries must ascend and number one less than the schedules, "
            f"got {list(boundaries)} for {len(schedules)} schedules; pass one between each two schedules"
        )

    def value(step: int) -> float:
        index = sum(step >= boundary for boundary in boundaries)
        return schedules[index](step - (boundaries[index - 1] if index else 0))

    return value


def _progress(step: int, num_steps: int) -> float:
    return min(max(step / num_steps, 0.0), 1.0)
