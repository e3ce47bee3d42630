"""The formulas of docs/scale.md equal the bytes that are stored and sent."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

from scale_model import (  # pyright: ignore[reportMissingImports]
    bank_memory,
    gather_bytes,
    gather_gradient_bytes,
    loss_flop,
    parameter_gradient_bytes,
)

from raycl.distributed import gather
from raycl.negatives.spec import BankSpec, Precision
from tests.workers.processes import run_workers

BATCH, DIM = 2_048, 64


@pytest.mark.parametrize(("dtype", "itemsize"), [("float16", 2), ("float32", 4)])
def test_the_shards_together_use_the_memory_of_the_formula(dtype: Precision, itemsize: int) -> None:
    plan = BankSpec(
        name="b", kind="memory_bank", dim=DIM, output="out", capacity=1_003, num_shards=5, dtype=dtype
    )
    assert sum(map(plan.bytes_of, range(5))) == bank_memory(1_003, DIM, itemsize=itemsize)


def _bytes_of_gather(rank: int, num_workers: int) -> tuple[float, float]:
    from scale_training import sent_by  # pyright: ignore[reportMissingImports]

    rows = torch.ones(BATCH // num_workers, DIM, requires_grad=True)
    gathered = gather(rows)
    return sent_by(lambda: gather(rows)), sent_by(lambda: gathered.sum().backward(retain_graph=True))


def test_a_gather_and_its_gradient_send_the_bytes_of_the_formula() -> None:
    for forward, backward in run_workers(_bytes_of_gather, 2):
        assert forward == pytest.approx(gather_bytes(2, BATCH, DIM), rel=0.02)
        assert backward == pytest.approx(gather_gradient_bytes(2, BATCH, DIM, scatters=False), rel=0.02)


def test_a_single_worker_sends_nothing_and_computes_everything() -> None:
    assert gather_bytes(1, BATCH, DIM) == parameter_gradient_bytes(1, 10**6) == 0
    assert sum(loss_flop(8, BATCH, DIM) for _ in range(8)) == loss_flop(1, BATCH, DIM)
