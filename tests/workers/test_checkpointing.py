"""Activation checkpointing on several workers, whose BatchNorm and gradients are synchronized."""

import pytest
import torch
from torch import Tensor

from tests.pretend_gpu import CPU
from tests.pretended_steps import CASES, Case, Worker
from tests.workers.processes import run_workers


def weights_after_steps(rank: int, num_workers: int, every: int | None) -> list[Tensor]:
    settings = CASES["simclr clipped"].settings | {"stages.0.activation_checkpoint_every": every}
    worker = Worker(Case("simclr", settings), num_workers, CPU)
    worker.learner.wrap_ddp(CPU)
    for step, views in enumerate(worker.maker.views(worker.batches(2))):
        worker.step(views, step)
    return [each.detach() for each in [*worker.weights(), *worker.learner.tower.buffers()]]


@pytest.mark.parametrize("every", [1, 3])
def test_two_workers_that_recompute_have_the_same_weights_and_statistics(every: int) -> None:
    kept = run_workers(weights_after_steps, 2, None)
    recomputed = run_workers(weights_after_steps, 2, every)
    for ours, expected in zip(recomputed, kept, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
