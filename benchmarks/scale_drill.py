"""Is everything there that was acknowledged? Every row of a bank or queue looked at, and a shard lost on the way."""

import os
import signal
import time
from typing import Any

import numpy as np
import ray
from scale_clients import Work, join, num_wrong, run

from raycl.negatives.actor import BankActor, MemoryBankActor
from raycl.negatives.bank import Bank

ROWS_A_QUESTION = 65_536


def num_wrong_keys(bank: Bank, work: Work, num_steps: int) -> int:
    """Count the slots of a queue that do not hold the newest rows, all workers together."""
    if work.kind != "queue":
        return 0
    held, sequence = bank.read_queue().since(0)
    numbers = np.arange(sequence - len(held), sequence)
    strange = (held.sample_id != work.samples_of(numbers)) | (held.step != numbers // work.batch_size)
    not_pushed = sequence != num_steps * work.batch_size
    return int(strange.sum()) + num_wrong(held, work.patterns()) + not_pushed


def written_until(work: Work, num_steps: int) -> np.ndarray:
    """Return the step that wrote each sample last, int64 [num_rows]; -1 for first rows."""
    steps = np.full(work.num_rows, -1)
    for step in range(num_steps):
        steps[work.ids(step)] = step
    return steps


def check(bank: Bank, work: Work, *, num_steps: int, saved: int, killed: int) -> dict[str, int]:
    """Read every row and count the wrong ones.

    Rows that the killed shard was given after its snapshot may be lost: they then have the values of the
    snapshot. All others must be there.
    """
    expected, patterns = written_until(work, num_steps), work.patterns()
    kept = written_until(work, saved)
    found = {"rows": 0, "wrong_rows": 0, "wrong_ids": 0, "missing": 0, "lost_since_snapshot": 0}
    for shard, connection in enumerate(bank.connections()):
        first, stop = bank.spec.first_slots[shard : shard + 2]
        for start in range(0, int(stop - first), ROWS_A_QUESTION):
            part = connection.ask(MemoryBankActor.read_slots, start, start + ROWS_A_QUESTION)
            ids = np.arange(first + start, min(first + start + ROWS_A_QUESTION, stop))
            old = part.step != expected[ids]
            excused = old & (part.step == kept[ids]) & (shard == killed)
            found["rows"] += len(part.rows)
            found["wrong_ids"] += int((part.sample_id != ids).sum())
            found["wrong_rows"] += num_wrong(part, patterns)
            found["lost_since_snapshot"] += int(excused.sum())
            found["missing"] += int((old & ~excused).sum())
    return found


def lose_a_shard(groups: list[Any], bank: Bank, work: Work, num_steps: int) -> dict[str, Any]:
    """Fill the bank, make steps, save, make steps while a shard is killed, and look at every row."""
    active, _ = join(groups, bank, work)
    since = time.perf_counter()
    ray.get([group.fill.remote() for group in active])
    fill_s = time.perf_counter() - since
    half_s, _ = run(active, 0, num_steps)
    ray.get([group.flush.remote() for group in active])
    since = time.perf_counter()
    bank.save(num_steps)
    save_s = time.perf_counter() - since
    killed = bank.spec.num_shards // 2
    going_on = [group.run.remote(num_steps, 2 * num_steps) for group in active]
    since = time.perf_counter()
    time.sleep(half_s)
    connection = bank.connections()[killed]
    os.kill(connection.ask(BankActor.info).pid, signal.SIGKILL)
    killed_at = time.perf_counter()
    connection.ask(BankActor.info)
    back_s = time.perf_counter() - killed_at
    wrong = sum(spent.num_wrong for spent in ray.get(going_on))
    whole_s = time.perf_counter() - since
    restarts = sum(ray.get([group.flush.remote() for group in active]))
    since = time.perf_counter()
    found = check(bank, work, num_steps=3 * num_steps, saved=num_steps, killed=killed)
    return {
        **found,
        "wrong_while_running": wrong,
        "acknowledged": int((written_until(work, 3 * num_steps) >= 0).sum()),
        "fill_rows_per_s": work.num_rows / fill_s,
        "save_s": save_s,
        "save_mb": work.num_rows * (work.dim * bank.spec.row_dtype.itemsize + 16) / 1e6,
        "back_s": back_s,
        "step_ms_before": 1e3 * half_s / num_steps,
        "step_ms_with_loss": 1e3 * whole_s / (2 * num_steps),
        "clients_that_noticed": restarts,
        "check_s": time.perf_counter() - since,
    }
