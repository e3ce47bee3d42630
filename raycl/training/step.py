"""One optimization step: embed, candidates, loss, backward, update, store."""

import math

from raycl.distributed import all_sum, num_workers
from raycl.errors import NonFiniteLossError
from raycl.optimizers import set_learning_rate
from raycl.training.contrast import Contrast
from raycl.training.learner import Learner
from raycl.training.process import autocast
from raycl.training.stores import Store
from raycl.training.views import Views


def train_step(
    learner: Learner,
    store: Store,
    contrast: Contrast,
    views: Views,
    *,
    step: int,
    learning_rate: float,
    momentum: float,
    precision: str,
) -> float:
    """Make one step, the ``step``-th from 0, and return the loss of the global batch.

    Raises ``NonFiniteLossError`` on every worker before anything is changed.
    """
    set_learning_rate(learner.optimizer, learning_rate)
    lent = store.lend(views, step=step)
    with autocast(precision, views.view_a.device):
        query, key = learner.embed(views, step=step)
    loss = contrast(query, key, lent, views.sample_id)
    value = float(all_sum(loss)) / num_workers()
    if not math.isfinite(value):
        raise NonFiniteLossError(f"the loss became {value}")
    learner.optimizer.zero_grad(set_to_none=True)
    loss.backward()
    learner.optimizer.step()
    learner.follow(momentum)
    # After the update and once: what a failed step would have written is never lent.
    store.take(query if key is None else key, views, step=step)
    return value
