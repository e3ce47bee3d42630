"""Is everything there that was acknowledged? Every row of a bank or queue looked at, and a shard lost on the way."""

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import ray
from scale_clients import NUM_PATTERNS, Work, join, num_wrong, pattern_of, run

from raycl.negatives.actor import BankActor, MemoryBankActor
from raycl.negatives.bank import Bank, connect_bank
from raycl.negatives.rpc import ShardConnection
from raycl.negatives.snapshot import snapshot_folder
from raycl.negatives.store import Negatives

ROWS_A_QUESTION = 65_536
NUM_ASKED, NUM_NEAREST = 64, 10


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


def kill(connection: ShardConnection) -> None:
    """End a shard's process without warning."""
    os.kill(connection.ask(BankActor.info).pid, signal.SIGKILL)


def ask_until(stop: threading.Event, name: str, work: Work) -> dict[str, int]:
    """Connect to the bank and ask for rows, neighbors and statistics, again and again; count the wrong answers."""
    found, patterns, random = {"questions": 0, "wrong_answers": 0}, work.patterns(), np.random.default_rng(0)
    while not stop.is_set():
        bank = connect_bank(name)
        ids = random.choice(work.num_rows, NUM_ASKED, replace=False)
        rows, query = bank.get(ids), patterns[random.integers(NUM_PATTERNS)]
        (near,) = bank.nearest(query, NUM_NEAREST)
        cosine = patterns[pattern_of(near.sample_id, near.step)] @ query
        is_right = [
            np.array_equal(rows.sample_id, ids),
            num_wrong(Negatives(rows.rows, rows.sample_id, rows.step), patterns) == 0,
            rows.step.max() <= rows.newest_step and near.step.max(initial=-1) <= near.newest_step,
            np.allclose(near.similarity, cosine, atol=5e-3),
            bank.stats().rows == work.num_rows,
        ]
        found["questions"] += 3
        found["wrong_answers"] += is_right.count(False)
    return found


def kill_while_asked(
    bank: Bank, work: Work, num_kills: int, write: Callable[[int], object]
) -> dict[str, Any]:
    """Kill shards in turn, and let ``write`` refresh and save the bank after each kill, while a thread asks."""
    stop, since = threading.Event(), time.perf_counter()
    with ThreadPoolExecutor(1) as threads:
        asking = threads.submit(ask_until, stop, bank.spec.name, work)
        try:
            for number in range(num_kills):
                kill(bank.connections()[number % bank.spec.num_shards])
                write(number)
        finally:
            stop.set()
    return asking.result() | {"kills": num_kills, "seconds": time.perf_counter() - since}


def save(bank: Bank, step: int) -> dict[str, float]:
    """Save the bank; return the seconds and the MB of the files."""
    since = time.perf_counter()
    bank.save(step)
    seconds = time.perf_counter() - since
    files = snapshot_folder(bank.spec, step).files()
    return {"s": seconds, "mb": sum(size for _, size in files) / 1e6}


def lose_a_shard(groups: list[Any], bank: Bank, work: Work, num_steps: int) -> dict[str, Any]:
    """Fill and save the bank, make steps, save an increment, make steps while a shard is killed, and look at every row."""
    active, _ = join(groups, bank, work)
    since = time.perf_counter()
    ray.get([group.fill.remote() for group in active])
    fill_s = time.perf_counter() - since
    base = save(bank, 0)
    half_s, _ = run(active, 0, num_steps)
    ray.get([group.flush.remote() for group in active])
    increment = save(bank, num_steps)
    killed = bank.spec.num_shards // 2
    going_on = [group.run.remote(num_steps, 2 * num_steps) for group in active]
    since = time.perf_counter()
    time.sleep(half_s)
    connection = bank.connections()[killed]
    kill(connection)
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
        "base": base | {"rows": work.num_rows},
        "increment": increment | {"rows": int((written_until(work, num_steps) >= 0).sum())},
        "back_s": back_s,
        "step_ms_before": 1e3 * half_s / num_steps,
        "step_ms_with_loss": 1e3 * whole_s / (2 * num_steps),
        "clients_that_noticed": restarts,
        "check_s": time.perf_counter() - since,
    }
