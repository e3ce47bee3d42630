"""One optimization step: embed, candidates, loss, backward, update, store."""

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from raycl.device_copy import Download
from raycl.distributed import all_sum, gather_detached, gather_uneven, num_workers
from raycl.embedding_metrics import MAX_ROWS
from raycl.errors import NonFiniteLossError
from raycl.optimizers import set_learning_rate
from raycl.step_timer import phase
from raycl.training.example_ids import assign_example_ids
from raycl.training.objectives import Objective
from raycl.training.process import autocast
from raycl.training.stores import Store
from raycl.training.train_state import TrainState
from raycl.training.views import Views


@final
@dataclass(frozen=True, kw_only=True)
class StepOutput:
    """The result of a step: the loss of the global batch, and a few embeddings if the step is watched.

    ``watched`` are queries of all workers and their positives, each an embedding or a slot, both [n, dim].
    ``collapsed_loss`` is what the loss would be if all embeddings were one point, where that is known.
    ``is_to_stop`` is true on all workers once one of them was asked to stop.
    """

    loss: float
    collapsed_loss: float | None
    is_to_stop: bool = False
    watched: Download | None = None


def train_step(
    learner: TrainState,
    store: Store,
    contrast: Objective,
    views: Views,
    *,
    step: int,
    learning_rate: float,
    momentum: float,
    precision: str,
    is_to_stop: bool = False,
    is_watched: bool = False,
) -> StepOutput:
    """Make one step, the ``step``-th from 0; ``is_to_stop`` says whether this worker was asked to stop.

    Raises ``NonFiniteLossError`` on every worker before anything is changed.
    """
    set_learning_rate(learner.optimizer, learning_rate)
    with phase("store"):
        lent = store.fetch(views, step=step)
    with phase("forward"), autocast(precision, views.view_a.device):
        query, key, negatives = learner.embed(views, step=step)
    with phase("loss"):
        ids = assign_example_ids(views.known)
        lent = lent.identified(ids)
        if negatives is not None and ids.negative is not None:
            lent = lent.joined(*gather_uneven(negatives, *ids.of_negatives()))
        loss = contrast(query, key, lent, ids)
    with phase("store"):
        store.start_download(query if key is None else key, views, ids.key_name)
    positive = lent.key if key is None else key
    assert positive is not None, "every query has a key or a slot"
    watched = _few(query, positive) if is_watched else None
    with phase("loss"):
        # One message for both: a worker alone must not stop, and a further message would cost each step time.
        total, num_asked = all_sum(torch.stack([loss, torch.full_like(loss, is_to_stop)])).tolist()
        value = total / num_workers()
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss became {value}")
    with phase("backward"):
        learner.backward(loss)
    with phase("update"):
        learner.update()
        learner.follow(momentum)
    # After the update and once: what a failed step would have written is never lent.
    with phase("store"):
        store.update(step=step)
    return StepOutput(
        loss=value,
        is_to_stop=num_asked > 0,
        collapsed_loss=contrast.collapsed_loss(batch_size=len(query) * num_workers(), lent=lent),
        watched=watched,
    )


def _few(query: Tensor, positive: Tensor) -> Download:
    """Begin to fetch as many rows as a look needs, of all workers: of one's own alone, some figures would be chance."""
    few = -(-MAX_ROWS // num_workers())
    return Download(gather_detached(query[:few]), gather_detached(positive[:few]))
