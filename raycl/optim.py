"""Optimizers without weight decay of biases and normalization weights, and schedules from step to value."""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from raycl.distributed import all_sum, num_workers, rank
from raycl.eager_torch import without_compiler
from raycl.errors import ConfigError

Schedule = Callable[[int], float]
OptimizerName = Literal["sgd", "adamw", "lars", "muon"]
OPTIMIZERS = get_args(OptimizerName)


def build_optimizer(
    name: OptimizerName,
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
    decay and no LARS scaling, as in SimCLR. ``muon`` treats them with AdamW, and the weights of ``nn.Embedding`` too.
    ``learning_rate_scales`` multiply the learning rate of a parameter, 1 if it is missing. Raises ``ConfigError``
    for an unknown name.
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
    if name not in OPTIMIZERS:
        raise ConfigError(f"unknown optimizer {name!r}; there are {', '.join(OPTIMIZERS)}")
    # torch asks for its compiler at the first call of these methods.
    with without_compiler():
        if name == "adamw":
            optimizer: Optimizer = AdamW(groups, lr=0.0, betas=betas, fused=True)
        elif name == "sgd":
            optimizer = SGD(groups, lr=0.0, momentum=momentum, fused=True)
        elif name == "muon":
            tables = {
                each.weight for each in module.modules() if isinstance(each, nn.Embedding | nn.EmbeddingBag)
            }
            optimizer = Muon(groups, momentum=momentum, betas=betas, tables=tables)
        else:
            optimizer = LARS(groups, momentum=momentum, trust_coefficient=trust_coefficient)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.zero_grad()
    return optimizer


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


def take_step(optimizer: Optimizer) -> None:
    """Update the parameters; torch's own optimizers import the compiler at each step."""
    with without_compiler():
        optimizer.step()


@final
class LARS(Optimizer):
    """SGD with steps scaled by the ratio of weight norm to gradient norm (You et al., 2017)."""

    def __init__(self, groups: list[dict[str, Any]], *, momentum: float, trust_coefficient: float) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "trust_coefficient": trust_coefficient})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step, after ``closure``, which computes the loss and the gradients; return its loss."""
        loss = _evaluated(closure)
        for group in self.param_groups:
            parameters = [p for p in group["params"] if p.grad is not None]
            if parameters:
                self._step_group(group, parameters)
        return loss

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


def _evaluated(closure: Callable[[], float] | None) -> float | None:
    if closure is None:
        return None
    with torch.enable_grad():
        return closure()


def _adapted(parameters: list[Tensor], gradients: list[Tensor], trust_coefficient: float) -> list[Tensor]:
    """Scale each gradient by trust_coefficient * |weight| / |gradient|, where both norms are nonzero."""
    of_weights, of_gradients = (torch.stack(torch._foreach_norm(each)) for each in (parameters, gradients))
    are_given = (of_weights > 0) & (of_gradients > 0)
    ratios = torch.where(are_given, trust_coefficient * of_weights / of_gradients, 1.0)
    return list(torch._foreach_mul(gradients, list(ratios.unbind())))


@final
class Muon(Optimizer):
    """Orthogonal steps for matrices and filters (Jordan et al., 2024), AdamW for all other parameters.

    The momentum of a matrix, or of a filter as a matrix of its output channels, is replaced by the nearest
    orthogonal matrix, which five steps of Newton-Schulz approximate. The root mean square of its step is 0.2
    times the learning rate, about AdamW's, so that both use one learning rate (Liu et al., 2025). Weight
    decay is decoupled. ``tables`` and parameters without two or four dimensions take AdamW's steps: biases, normalization
    weights, and position embeddings [1, length, dim]. Those of two or four dimensions count as matrices or filters.
    """

    def __init__(
        self,
        groups: list[dict[str, Any]],
        *,
        momentum: float,
        betas: tuple[float, float],
        tables: Collection[Tensor],
    ) -> None:
        super().__init__(groups, {"lr": 0.0, "momentum": momentum, "betas": betas})
        self._tables = frozenset(tables)

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Perform one step, after ``closure``, which computes the loss and the gradients; return its loss."""
        loss = _evaluated(closure)
        matrices: list[_Matrices] = []
        for group in self.param_groups:
            by_shape = defaultdict[tuple[int, int] | None, list[Tensor]](list)
            for parameter in group["params"]:
                if parameter.grad is not None:
                    by_shape[self._matrix_shape(parameter)].append(parameter)
            for shape, parameters in by_shape.items():
                torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
                gradients = [p.grad for p in parameters if p.grad is not None]
                if shape is None:
                    self._adam_step(group, parameters, gradients)
                else:
                    ahead = self._momentum(group["momentum"], parameters, gradients)
                    matrices.append(_Matrices(parameters, ahead, 0.2 * max(shape) ** 0.5 * group["lr"]))
        for each, steps in zip(matrices, _shared([each.ahead for each in matrices]), strict=True):
            moved = [step.view_as(p) for step, p in zip(steps, each.parameters, strict=True)]
            torch._foreach_add_(each.parameters, moved, alpha=-each.size)
        return loss

    def _matrix_shape(self, parameter: Tensor) -> tuple[int, int] | None:
        is_matrix = parameter.ndim in (2, 4) and parameter not in self._tables
        return (len(parameter), parameter[0].numel()) if is_matrix else None

    def _momentum(self, momentum: float, parameters: list[Tensor], gradients: list[Tensor]) -> Tensor:
        """Return the momentum of parameters of one shape after Nesterov's look ahead, [number, rows, columns]."""
        buffers = [self._states(p, "momentum_buffer")["momentum_buffer"] for p in parameters]
        torch._foreach_lerp_(buffers, gradients, 1.0 - momentum)
        return torch.stack([each.flatten(1) for each in torch._foreach_lerp(gradients, buffers, momentum)])

    def _adam_step(self, group: dict[str, Any], parameters: list[Tensor], gradients: list[Tensor]) -> None:
        first, second = group["betas"]
        states = [self._states(p, "exp_avg", "exp_avg_sq") for p in parameters]
        for state in states:
            state["step"] = state.get("step", 0) + 1
        means, squares = ([state[name] for state in states] for name in ("exp_avg", "exp_avg_sq"))
        torch._foreach_lerp_(means, gradients, 1.0 - first)
        torch._foreach_mul_(squares, second)
        torch._foreach_addcmul_(squares, gradients, gradients, 1.0 - second)
        scales = [(1.0 - second ** state["step"]) ** 0.5 for state in states]
        roots = torch._foreach_div(torch._foreach_sqrt(squares), scales)
        torch._foreach_add_(roots, 1e-8)
        sizes = [-group["lr"] / (1.0 - first ** state["step"]) for state in states]
        torch._foreach_addcdiv_(parameters, means, roots, sizes)

    def _states(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter)
        return state


@final
@dataclass(frozen=True)
class _Matrices:
    """Parameters of one shape, their momentum as matrices, and the size of their step."""

    parameters: list[Tensor]
    ahead: Tensor
    size: float


def _shared(stacks: list[Tensor]) -> list[Tensor]:
    """Orthogonalize stacks of matrices, each matrix on one worker.

    The work is divided, and the weights stay equal on all workers, also if their processors round differently.
    """
    if num_workers() == 1:
        return [_orthogonalized(each) for each in stacks]
    steps, first = [torch.zeros_like(each) for each in stacks], 0
    for matrices, step in zip(stacks, steps, strict=True):
        mine = slice((rank() - first) % num_workers(), None, num_workers())
        first += len(matrices)
        if len(step[mine]):
            step[mine] = _orthogonalized(matrices[mine])
    together = all_sum(torch.cat([step.flatten() for step in steps])) if steps else torch.empty(0)
    parts = together.split([step.numel() for step in steps])
    return [part.view_as(step) for part, step in zip(parts, steps, strict=True)]


def _orthogonalized(matrices: Tensor) -> Tensor:
    """Approximate the nearest orthogonal matrices of ``matrices`` [number, rows, columns].

    Each step of Newton-Schulz multiplies by a polynomial of the product with the transpose. The polynomials are
    multiplied first, since that product is small for a filter.
    """
    is_tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if is_tall else matrices
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    gram = wide @ wide.mT
    identity = 3.4445 * torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    product = step = identity + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
    for _ in range(4):
        gram = step @ gram @ step
        step = identity + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315)
        product = step @ product
    wide = product @ wide
    return wide.mT if is_tall else wide


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


def _progress(step: int, num_steps: int) -> float:
    return min(max(step / num_steps, 0.0), 1.0)
