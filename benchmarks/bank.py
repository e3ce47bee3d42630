"""Training steps with the negatives in an actor beside the same steps with them in process.

    python benchmarks/bank.py [--json bank.json]

A queue of 65,536 keys (MoCo v2) and a memory bank of 1,281,167 slots (InstDisc, 4,096 drawn), both
of 128 numbers, batch 256, the small encoder of the CIFAR-10 run on random 32-pixel images. Blocks
of steps alternate between the two stores, on the same network. ``waited`` is the time that the step is
blocked on the actor, ``store`` all time in the store, in percent of the step.
Beside them rows read and written a second against numpy's own gather and scatter, and the memory
of the actor's process against the bytes of its rows.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import ray
import torch
from measuring import describe_machine, make_parser, private_mb, summarize, write_json

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.models.build import build_towers
from raycl.negatives import MemoryBank
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient
from raycl.negatives.start import start_bank
from raycl.ray_runtime import connect_cluster
from raycl.recipes import recipe
from raycl.training.process import prepare_process
from raycl.training.step import train_step
from raycl.training.stores import Store, bank_spec, build_store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.views import Views

BATCH, DIM, NUM_NEGATIVES = 256, 128, 4_096
CPU = torch.device("cpu")
METHODS: dict[str, dict[str, Any]] = {
    "moco_v2": {"negatives.capacity": 65_536},
    "instance_discrimination": {},
}


class Timed:
    """A store whose calls are timed."""

    def __init__(self, store: Store) -> None:
        self.store, self.spent_s = store, 0.0

    def fetch(self, views: Views, *, step: int) -> Any:
        with self.timing():
            return self.store.fetch(views, step=step)

    def start_download(self, rows: torch.Tensor, views: Views) -> None:
        with self.timing():
            self.store.start_download(rows, views)

    def update(self, *, step: int) -> None:
        with self.timing():
            self.store.update(step=step)

    @contextmanager
    def timing(self) -> Iterator[None]:
        since = time.perf_counter()
        yield
        self.spent_s += time.perf_counter() - since

    def waited_s(self) -> float:
        """Return the seconds waited since this was asked last."""
        return self.store.metrics(step=0, seconds=1.0)["negatives_wait_fraction"]


def config_of(method: str) -> RunConfig:
    small = {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.5}
    return override(recipe(method, image_size=32), {**small, **METHODS[method], "precision": "bfloat16"})


def batches(num_samples: int) -> Iterator[Views]:
    """Yield random views for ever; each batch knows the ids of the next."""
    rng = np.random.default_rng(0)
    view_a, view_b = torch.randn(2, BATCH, 3, 32, 32).unbind()
    ids = rng.choice(num_samples, BATCH, replace=False)
    while True:
        following = rng.choice(num_samples, BATCH, replace=False)
        yield Views(
            view_a=view_a, view_b=view_b, sample_id=torch.from_numpy(ids), ids=ids, next_ids=following
        )
        ids = following


def measure_steps(method: str, bank: Bank, sample_id: np.ndarray, blocks: int, steps: int) -> dict[str, Any]:
    """Alternate blocks of steps between the two stores."""
    config = config_of(method)
    towers = build_towers(config).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    learner = TrainState.build(config, towers, num_samples=len(sample_id))
    stage = config.stages[0]
    learner.set_embed_config(EmbedConfig.of(config, stage))
    contrast = learner.objective(config, stage, hinge_weight=0.0, num_samples=len(sample_id))
    stores = {
        "process": Timed(build_store(config, None, sample_id, CPU)),
        "actor": Timed(build_store(config, bank, sample_id, CPU)),
    }
    found: dict[str, list[dict[str, float]]] = {name: [] for name in stores}
    views, number = batches(len(sample_id)), 0
    for block in range(blocks + 1):
        for name, store in stores.items():
            store.waited_s()
            spent_s, times = store.spent_s, []
            for _ in range(steps):
                batch, since = next(views), time.perf_counter()
                train_step(
                    learner,
                    store,  # pyright: ignore[reportArgumentType]
                    contrast,
                    batch,
                    step=number,
                    learning_rate=0.01,
                    momentum=0.99,
                    precision="bfloat16",
                )
                times.append(time.perf_counter() - since)
                number += 1
            if block:  # the first block warms up
                total = sum(times)
                found[name].append(
                    {
                        "step_ms": 1e3 * statistics.median(times),
                        "waited_percent": 100 * store.waited_s() / total,
                        "store_percent": 100 * (store.spent_s - spent_s) / total,
                    }
                )
    ratios = [a["step_ms"] / p["step_ms"] for a, p in zip(found["actor"], found["process"], strict=True)]
    return {
        "method": method,
        "ratio": summarize(ratios),
        **{
            f"{name}_{key}": summarize([each[key] for each in rows])
            for name, rows in found.items()
            for key in rows[0]
        },
    }


def measure_rates(bank: Bank, sample_id: np.ndarray, repeats: int) -> dict[str, Any]:
    """Read and write slots by the actor, by the store, and by bare numpy."""
    client = MemoryBankClient(bank, sample_id, max_staleness=0)
    store = MemoryBank(sample_id, DIM, seed=0)
    rows = np.random.default_rng(0).standard_normal((len(sample_id), DIM), np.float32)
    times: dict[str, list[float]] = {}

    def timed(name: str, call: Any) -> None:
        since = time.perf_counter()
        call()
        times.setdefault(name, []).append(time.perf_counter() - since)

    for step in range(repeats):
        slots = np.random.default_rng(step).choice(len(sample_id), NUM_NEGATIVES + BATCH, replace=False)
        own, fresh = slots[:BATCH], np.random.default_rng(step).standard_normal((BATCH, DIM), np.float32)
        timed("read actor", lambda: client.read(slots))  # noqa: B023
        timed("read store", lambda: store.read(slots))  # noqa: B023
        timed("read numpy", lambda: np.take(rows, slots, axis=0))  # noqa: B023
        timed("write actor", lambda: client.update(sample_id[own], fresh, step))  # noqa: B023
        timed("write store", lambda: store.update(sample_id[own], fresh, step))  # noqa: B023
        timed("write numpy", lambda: rows.__setitem__(own, fresh))  # noqa: B023
    num_rows = {"read": NUM_NEGATIVES + BATCH, "write": BATCH}
    return {
        name: {
            "us": 1e6 * (middle := statistics.median(taken)),
            "rows_per_s": num_rows[name.split()[0]] / middle,
        }
        for name, taken in times.items()
    }


def measure(method: str, num_samples: int, arguments: argparse.Namespace) -> dict[str, Any]:
    sample_id = np.arange(num_samples)
    with tempfile.TemporaryDirectory() as folder:
        spec = bank_spec(config_of(method), output=folder, name=method, num_samples=num_samples)
        # The memory of a process with almost no rows.
        tiny = replace(spec, name="tiny", capacity=1_024, output=f"{folder}/tiny")
        small = start_bank(tiny, np.arange(1_024))
        bank = start_bank(spec, sample_id)
        result = measure_steps(method, bank, sample_id, arguments.blocks, arguments.steps)
        if spec.kind == "memory_bank":
            result["rates"] = measure_rates(bank, sample_id, arguments.repeats)
        held = [private_mb(each.stats().shards[0].pid) for each in (bank, small)]
        row_mb = spec.capacity * spec.dim * spec.row_dtype.itemsize / 1e6
        result["memory"] = {
            "held_mb": held[0] - held[1],
            "rows_mb": row_mb,
            "ratio": (held[0] - held[1]) / row_mb,
        }
        bank.stop()
        small.stop()
    return result


def show(result: dict[str, Any]) -> None:
    print(f"\n{result['method']}")
    for name in ("process", "actor"):
        step, waited, store = (
            result[f"{name}_{key}"] for key in ("step_ms", "waited_percent", "store_percent")
        )
        print(
            f"  {name:8} step {step['median']:7.2f} ms ({step['min']:.2f}-{step['max']:.2f})   "
            f"waited {waited['median']:.2f}%   store {store['median']:.2f}%"
        )
    ratio = result["ratio"]
    print(f"  actor / process {ratio['median']:.3f} ({ratio['min']:.3f}-{ratio['max']:.3f})")
    memory = result["memory"]
    print(
        f"  actor's memory {memory['held_mb']:.0f} MB for {memory['rows_mb']:.0f} MB of rows: {memory['ratio']:.3f}"
    )
    for name, rate in result.get("rates", {}).items():
        print(f"  {name:12} {rate['us']:8.0f} us  {rate['rows_per_s'] / 1e6:6.2f} million rows/s")


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--blocks", type=int, default=7, help="blocks of each store")
    parser.add_argument("--steps", type=int, default=20, help="steps a block")
    parser.add_argument("--repeats", type=int, default=50, help="reads and writes")
    arguments = parser.parse_args()
    prepare_process(os.cpu_count() or 1)
    connect_cluster()
    results = [
        measure("moco_v2", 50_000, arguments),
        measure("instance_discrimination", 1_281_167, arguments),
    ]
    for result in results:
        show(result)
    write_json(arguments.json, {"machine": describe_machine(), "results": results})
    ray.shutdown()


if __name__ == "__main__":
    main()
