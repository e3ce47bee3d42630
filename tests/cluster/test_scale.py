"""The simulated workers in benchmarks/scale.py: real clients that send the bytes of the model."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

from scale_clients import ClientGroup, Work  # pyright: ignore[reportMissingImports]
from scale_drill import check, kill_while_asked, num_wrong_keys  # pyright: ignore[reportMissingImports]
from scale_model import bank_payload, queue_payload  # pyright: ignore[reportMissingImports]

from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient
from raycl.negatives.spec import BankSpec
from raycl.negatives.start import start_bank

pytestmark = pytest.mark.usefixtures("ray_cluster")

WORKERS, SHARDS, ROWS, BATCH, DRAWN, DIM, STEPS = 3, 2, 1_000, 16, 64, 32, 4


def a_bank(kind: str, output: Path) -> Bank:
    plan = BankSpec(
        name=f"scale {kind}",
        kind=kind,  # pyright: ignore[reportArgumentType]
        dim=DIM,
        output=str(output),
        capacity=ROWS,
        dtype="float16",
        momentum=0.0,
        num_shards=SHARDS if kind == "memory_bank" else 1,
    )
    return start_bank(plan, np.arange(ROWS) if kind == "memory_bank" else None)


def some_work(kind: str) -> Work:
    drawn = DRAWN if kind == "memory_bank" else 0
    return Work(
        kind=kind, num_workers=WORKERS, num_rows=ROWS, local_batch=BATCH, num_negatives=drawn, dim=DIM
    )


def test_a_bank_transfers_the_bytes_of_the_model_keeps_every_row_and_answers_while_shards_are_killed(
    tmp_path: Path,
) -> None:
    bank, work = a_bank("memory_bank", tmp_path), some_work("memory_bank")
    group = ClientGroup()
    group.join(bank, work, list(range(WORKERS)))
    group.fill()
    spent = group.run(0, STEPS, keeps_answers=True)
    group.flush()
    one = bank_payload(WORKERS * BATCH, DRAWN, DIM, itemsize=2)
    assert (spent.sent, spent.received) == (STEPS * one.sent, STEPS * one.received)
    assert (spent.num_calls, spent.num_wrong) == (STEPS * SHARDS, 0)
    whole = {"rows": ROWS, "wrong_rows": 0, "wrong_ids": 0, "missing": 0, "lost_since_snapshot": 0}
    assert check(bank, work, num_steps=STEPS, saved=0, killed=-1) == whole

    def write(number: int) -> None:
        group.run(STEPS + number, 1)
        group.flush()
        bank.save(STEPS + number + 1)

    # Every question is answered, and right, while both shards are killed in turn.
    bank.save(STEPS)
    asked = kill_while_asked(bank, work, 2, write)
    assert asked["questions"] > 0
    assert (asked["wrong_answers"], bank.stats().restarts) == (0, 2)
    last = STEPS + 2

    # The check also detects errors: a row of another sample, and a step that never happened.
    stranger = MemoryBankClient(bank, np.arange(ROWS))
    stranger.update(np.array([7]), work.patterns()[:1], step=last - 1)
    stranger.flush()
    found = check(bank, work, num_steps=last + 1, saved=0, killed=-1)
    assert found["wrong_rows"] == 1
    assert found["missing"] >= WORKERS * BATCH
    bank.stop()


def test_a_queue_transfers_the_bytes_of_the_model_and_keeps_the_newest_keys(tmp_path: Path) -> None:
    bank, work = a_bank("queue", tmp_path), some_work("queue")
    group = ClientGroup()
    group.join(bank, work, list(range(WORKERS)))
    num_steps = ROWS // work.batch_size + 3  # the queue wraps around
    spent = group.run(0, num_steps)
    group.flush()
    assert spent.sent == WORKERS * num_steps * queue_payload(BATCH, DIM, itemsize=2).sent
    assert num_wrong_keys(bank, work, num_steps) == 0
    assert num_wrong_keys(bank, work, num_steps + 1) > 0
    bank.stop()
