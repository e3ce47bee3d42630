"""Measures and decisions that workers with few rows must share."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.batchnorm import synchronize
from raycl.distributed import average_
from raycl.distributed.device_copy import Download
from raycl.evaluation.embedding_metrics import measure
from raycl.gradient_cache import embed_in_chunks
from raycl.training.collapse_monitor import CollapseMonitor
from raycl.training.step import StepOutput, _few
from tests.workers.processes import run_workers

LOCAL = 3  # too few for the monitor on a single worker


def embeddings() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    query = F.normalize(torch.randn(4 * LOCAL, 8, generator=generator), dim=1)
    return query, F.normalize(query + 0.1, dim=1)


def looks(rank: int, num_workers: int) -> tuple[dict[str, float], str | None]:
    query, key = (each[rank * LOCAL :][:LOCAL] for each in embeddings())
    monitor = CollapseMonitor(initial_patience=3)
    counts = Download(torch.tensor([rank, 4 if rank else 0]))  # the first worker has no negatives
    output = StepOutput(loss=1.0, collapsed_loss=9.0, watched=_few(query, key), guided=counts)
    measures = output.measure()
    monitor.update(step=1, measures=measures, loss=1.0, collapsed_loss=9.0)
    point = StepOutput(loss=1.0, collapsed_loss=1.0, watched=_few(torch.ones(LOCAL, 8), torch.ones(LOCAL, 8)))
    warnings = [
        monitor.update(step=step, measures=point.measure(), loss=1.0, collapsed_loss=1.0)
        for step in (2, 3, 4)
    ]
    return measures, warnings[-1]


def test_the_monitor_measures_the_rows_of_all_workers_as_one_batch() -> None:
    expected = measure(*embeddings()).known() | {"guide_masked_fraction": (0 + 1 / 4 + 2 / 4 + 3 / 4) / 4}
    for measures, warnings in run_workers(looks, 4):
        assert measures.keys() == expected.keys()
        for name, value in measures.items():
            assert abs(value - expected[name]) < 1e-5, name
        assert warnings is not None


def gradient_of_uneven_rows(rank: int, num_workers: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    tower = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)).double()
    synchronize(tower)
    rows = torch.rand(11, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    own = rows.split((4, 7))[rank] if num_workers > 1 else rows
    # Four rows are one chunk, seven are two.
    embed_in_chunks(tower, own, chunk_size=4).square().sum().mul(num_workers).backward()
    gradients = [each.grad for each in tower.parameters() if each.grad is not None]
    average_(gradients)
    mean = next(each for name, each in tower.named_buffers() if name.endswith("running_mean"))
    return torch.cat([each.flatten() for each in gradients]), mean


def test_workers_with_synchronized_layers_all_chunk_their_batches_or_none() -> None:
    gradient, mean = gradient_of_uneven_rows(0, 1)
    for ours, its_mean in run_workers(gradient_of_uneven_rows, 2):
        assert (ours - gradient).norm() < 1e-9 * gradient.norm()
        assert torch.allclose(its_mean, mean)
