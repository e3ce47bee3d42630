"""One optimization step: embeddings, stored negatives, loss, backward pass, update, store."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raycl.distributed import all_sum, gather_detached, mean_over_workers, num_workers
from raycl.distributed.device_copy import Download
from raycl.distributed.step_timer import phase
from raycl.errors import NonFiniteLossError
from raycl.evaluation.embedding_metrics import MAX_ROWS, measure
from raycl.losses.objective import Objective, ViewPair, mean_over_pairs, positive_of
from raycl.optim import set_learning_rate
from raycl.training.process import autocast
from raycl.training.stores import Store
from raycl.training.train_state import Embedded, TrainState
from raycl.training.views import Views


@final
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The loss of the global batch, and a few embeddings if the step is logged.

    ``watched`` are queries of all workers and their positives, both [n, dim]. ``collapsed_loss`` is the
    loss if all embeddings were equal, or None if it is unknown. ``stop_requested`` is true on all workers once
    a stop was requested from one of them, and ``check_requested`` if the first one asked for a check.
    ``grad_norm`` is the norm of the clipped gradient before clipping. ``guided`` are the counts of
    negatives that a guide masks.
    """

    loss: float
    collapsed_loss: float | None
    stop_requested: bool = False
    check_requested: bool = False
    watched: Download | None = None
    grad_norm: Download | None = None
    guided: Download | None = None

    def measure(self) -> dict[str, float]:
        """Return the metrics of the watched embeddings and the gradient, equal on all workers; collective."""
        assert self.watched is not None, "only a watched step keeps embeddings"
        measures = measure(*self.watched.arrived()).known()
        if self.grad_norm is not None:
            measures["grad_norm"] = self.grad_norm.arrived()[0].item()
        if self.guided is not None:
            masked, negatives = self.guided.arrived()[0].tolist()
            measures["guide_masked_fraction"] = masked / max(1, negatives)
        # Machines round differently: without the mean, a single worker might detect a collapse.
        return dict(zip(measures, mean_over_workers(list(measures.values())), strict=True))


def train_step(
    state: TrainState,
    store: Store,
    objective: Objective,
    views: Views,
    *,
    step: int,
    learning_rate: float,
    momentum: float,
    precision: str,
    stop_requested: bool = False,
    check_requested: bool = False,
    is_watched: bool = False,
    embed: Callable[..., Embedded] | None = None,
) -> StepOutput:
    """Make one step; ``step`` counts from 0, ``stop_requested`` is this worker's own.

    ``check_requested`` asks all workers to check whether a checkpoint is due; only the first worker may set it.

    ``embed`` replaces ``state.embed``.

    Raises ``NonFiniteLossError`` on every worker before any state changes.
    """
    set_learning_rate(state.optimizer, learning_rate)
    with phase("store"):
        stored = store.fetch(views, step=step)
    with phase("forward"), autocast(precision, views.view_a.device):
        embedded = (embed or state.embed)(views, step=step)
    query, key = embedded.query, embedded.key
    with phase("loss"):
        stored = stored.for_batch(views.example_ids, embedded.negatives)
        pairs = embedded.pairs or [ViewPair(query, key)]
        loss = mean_over_pairs(objective, pairs, stored, views.example_ids)
    with phase("store"):
        written = query if key is None else key
        if stored.partition is not None:
            written = stored.partition.of_batch()
        store.start_download(written, views, embedded.key_step)
    watched = _few(query, positive_of(key, stored)) if is_watched else None
    with phase("loss"):
        # One collective for all: the workers must stop together, and a second one would slow each step.
        requests = torch.full_like(loss, 2 * stop_requested + check_requested)
        total, sum_of_requests = all_sum(torch.stack([loss, requests])).tolist()
        value = total / num_workers()
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss became {value}")
    with phase("backward"):
        state.backward(loss)
    with phase("update"):
        grad_norm = state.update()
        state.update_momentum_encoder(momentum)
        state.update_ema(step=step)
    # Once and after the update: the store never returns keys of a failed step.
    with phase("store"):
        store.update(step=step)
    collapsed_loss = objective.collapsed_loss(batch_size=len(query) * num_workers(), stored=stored)
    if value == 0 and views.example_ids.weight is not None:
        collapsed_loss = 0.0  # all weights of the batch are 0
    return StepOutput(
        loss=value,
        stop_requested=sum_of_requests >= 2,
        check_requested=sum_of_requests % 2 == 1,
        # The number of candidates that a guide leaves is unknown.
        collapsed_loss=collapsed_loss if views.example_ids.guide is None else None,
        watched=watched,
        grad_norm=Download(grad_norm) if is_watched and grad_norm is not None else None,
        guided=_guided(views) if is_watched else None,
    )


def _guided(views: Views) -> Download | None:
    """Start to copy the counts of negatives that a guide masks to the host, if there is a guide."""
    guide = views.example_ids.guide
    return None if guide is None or guide.counts is None else Download(guide.counts)


def _few(query: Tensor, positive: Tensor) -> Download:
    """Start to copy some rows of all workers to the host: the rows of one worker may be too few for the metrics."""
    few = -(-MAX_ROWS // num_workers())
    return Download(gather_detached(query[:few]), gather_detached(positive[:few]))
