"""The losses of steps that one process computes again in float64."""

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from raycl.losses.objective import Partition, StoreBatch
from raycl.step_replay.restore import BeforeStep
from raycl.training.step_runner import StepRunner
from raycl.training.stores import Store
from raycl.training.views import Views


def losses_in_float64(before: BeforeStep, num_steps: int) -> list[float]:
    """Return the losses of the next steps, with weights, optimizer, embeddings and loss in float64.

    The views are the same as in training, in float32.
    """
    runner = before.runner
    widen(runner)
    losses = [runner.step(in_float64(before.views)).loss]
    while len(losses) < num_steps:
        losses.append(runner.step(in_float64(next(before.coming))).loss)
    return losses


def widen(runner: StepRunner) -> None:
    """Convert the state of a runner to float64."""
    state = runner.state
    parts = (state.tower, state.prediction_head, state.temperature, state.momentum_encoder, state.ema)
    for part in [*parts, state.normalizer]:
        if isinstance(part, nn.Module):
            part.double()
    for moments in state.optimizer.state.values():
        moments.update({name: _wide(value) for name, value in moments.items() if name != "step"})
    runner.store = _WideStore(runner.store)


def in_float64(views: Views) -> Views:
    """Return views of images in float64; tokens stay integers."""
    return replace(
        views,
        view_a=_wide(views.view_a),
        view_b=_wide(views.view_b),
        further=_wide(views.further),
        crops=_wide(views.crops),
        negatives=_wide(views.negatives),
        example_ids=replace(views.example_ids, weight=_wide(views.example_ids.weight)),
    )


@final
class _WideStore(Store):
    """A store whose rows are read in float64, and written in its own precision; it has no snapshots and no metrics."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def fetch(self, views: Views, *, step: int) -> StoreBatch:
        """Return the stored rows in float64."""
        stored = self._store.fetch(views, step=step)
        partition = stored.partition
        if partition is not None:
            partition = Partition(stored=_wide(partition.stored))
        wide = {each.name: _wide(getattr(stored, each.name)) for each in fields(stored)}
        return replace(stored, **wide | {"partition": partition})

    def start_download(self, rows: Tensor, views: Views, key_step: Tensor | None = None) -> None:
        """Start to copy the rows."""
        self._store.start_download(rows.float(), views, key_step)

    def update(self, *, step: int) -> None:
        """Store the rows."""
        self._store.update(step=step)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the store."""
        return self._store.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of the store."""
        self._store.load_state_dict(state)


def _wide(value: Any) -> Any:
    """Return floating-point tensors in float64, other values unchanged."""
    if isinstance(value, tuple):
        return tuple(map(_wide, value))
    return value.to(torch.float64) if isinstance(value, Tensor) and value.is_floating_point() else value
