"""Training steps with the negatives in an actor beside the same steps with them in process.

    python benchmarks/bank.py [--blocks 7] [--steps 20] [--repeats 50] [--json FILE]

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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import ray
import torch
from measuring import Line, alternate, make_parser, markdown_table, private_mb, report, timed, write_figure
from training_steps import SMALL

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.losses.example_ids import ExampleIds
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
METHODS: dict[str, tuple[int, dict[str, Any]]] = {  # samples and settings
    "moco_v2": (50_000, {"negatives.capacity": 65_536}),
    "instance_discrimination": (1_281_167, {}),
}


class Timed:
    """A store whose calls are timed."""

    def __init__(self, store: Store) -> None:
        self.store, self.spent_s = store, 0.0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self.store, name)

        def call(*arguments: Any, **named: Any) -> Any:
            since = time.perf_counter()
            try:
                return method(*arguments, **named)
            finally:
                self.spent_s += time.perf_counter() - since

        return call

    def waited_s(self) -> float:
        """Return the seconds waited since this was asked last."""
        return self.store.metrics(step=0, seconds=1.0)["negatives_wait_fraction"]


def config_of(method: str) -> RunConfig:
    return override(recipe(method, image_size=32), SMALL | METHODS[method][1] | {"precision": "bfloat16"})


def batches(num_samples: int) -> Iterator[Views]:
    """Yield random views for ever; each batch knows the ids of the next two."""
    rng = np.random.default_rng(0)
    view_a, view_b = torch.randn(2, BATCH, 3, 32, 32).unbind()
    coming = [rng.choice(num_samples, BATCH, replace=False) for _ in range(2)]
    while True:
        coming.append(rng.choice(num_samples, BATCH, replace=False))
        ids = coming.pop(0)
        sample_id = torch.from_numpy(ids)
        yield Views(
            view_a=view_a,
            view_b=view_b,
            sample_id=sample_id,
            ids=ids,
            example_ids=ExampleIds(query=sample_id, key=sample_id),
            next_ids=tuple(coming),
        )


def compare_steps(method: str, bank: Bank, sample_id: np.ndarray, options: argparse.Namespace) -> list[Line]:
    """Alternate blocks of steps between the two stores."""
    config = config_of(method)
    towers = build_towers(config).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    learner = TrainState.build(config, towers, num_samples=len(sample_id))
    stage = config.stages[0]
    learner.set_embed_config(EmbedConfig.of(config, stage))
    contrast = learner.objective(config, stage, hinge_weight=0.0, num_samples=len(sample_id))
    views, numbers = batches(len(sample_id)), iter(range(10**9))

    def block(store: Timed) -> dict[str, float]:
        store.waited_s()
        spent_s, seconds = store.spent_s, []
        for _ in range(options.steps):
            batch, since = next(views), time.perf_counter()
            train_step(
                learner,
                store,  # pyright: ignore[reportArgumentType]
                contrast,
                batch,
                step=next(numbers),
                learning_rate=0.01,
                momentum=0.99,
                precision="bfloat16",
            )
            seconds.append(time.perf_counter() - since)
        return {
            "step_ms": 1e3 * statistics.median(seconds),
            "waited_percent": 100 * store.waited_s() / sum(seconds),
            "store_percent": 100 * (store.spent_s - spent_s) / sum(seconds),
        }

    sides = {
        side: partial(block, Timed(build_store(config, place, sample_id, CPU)))
        for side, place in (("process", None), ("actor", bank))
    }
    return alternate(sides, options.blocks, warmup=1)


def compare_rows(bank: Bank, sample_id: np.ndarray, repeats: int) -> list[Line]:
    """Read and write slots by the actor, by the store, and by bare numpy."""
    actor = MemoryBankClient(bank, sample_id)
    store = MemoryBank(sample_id, DIM, seed=0)
    rows = np.random.default_rng(0).standard_normal((len(sample_id), DIM), np.float32)
    rng, numbers = np.random.default_rng(0), iter(range(10**9))

    def drawn(number: int) -> np.ndarray:
        return rng.choice(len(sample_id), number, replace=False)

    def side(num_rows: int, call: Callable[[np.ndarray], Any]) -> Callable[[], dict[str, float]]:
        def run() -> dict[str, float]:
            slots = drawn(num_rows)
            wall_ms = timed(lambda: call(slots))()["wall_ms"]
            return {"us": 1e3 * wall_ms, "rows_per_s": num_rows / wall_ms * 1e3}

        return run

    fresh = rng.standard_normal((BATCH, DIM), np.float32)
    reads = {
        "actor": lambda slots: (actor.ask(slots), actor.answer()),
        "store": store.read,
        "numpy": lambda slots: np.take(rows, slots, axis=0),
    }
    writes = {
        "actor": lambda slots: (actor.update(sample_id[slots], fresh, next(numbers)), actor.flush()),
        "store": lambda slots: store.update(sample_id[slots], fresh, next(numbers)),
        "numpy": lambda slots: rows.__setitem__(slots, fresh),
    }
    sides = {f"read {name}": side(NUM_NEGATIVES + BATCH, call) for name, call in reads.items()}
    return alternate(sides | {f"write {name}": side(BATCH, call) for name, call in writes.items()}, repeats)


def compare(method: str, options: argparse.Namespace) -> list[Line]:
    sample_id = np.arange(METHODS[method][0])
    with tempfile.TemporaryDirectory() as folder:
        spec = bank_spec(config_of(method), output=folder, name=method, num_samples=len(sample_id))
        # The memory of a process with almost no rows.
        tiny = replace(spec, name="tiny", capacity=1_024, output=f"{folder}/tiny")
        ids = (None, None) if spec.kind == "queue" else (np.arange(1_024), sample_id)
        small, bank = start_bank(tiny, ids[0]), start_bank(spec, ids[1])
        lines = compare_steps(method, bank, sample_id, options)
        if spec.kind == "memory_bank":
            lines += compare_rows(bank, sample_id, options.repeats)
        held, empty = (private_mb(each.stats().shards[0].pid) for each in (bank, small))
        lines.append({"side": "held", "memory_mb": held - empty})
        lines.append({"side": "rows", "memory_mb": spec.capacity * spec.dim * spec.row_dtype.itemsize / 1e6})
        bank.stop()
        small.stop()
    return [{"method": method} | line for line in lines]


def table(lines: Sequence[Line]) -> str:
    """Return the time of a step in its store, the rate of rows, and the memory of an actor."""
    stores = {"process": "in process", "actor": "in an actor"}
    steps = [
        [line["method"], stores[line["side"]], write_figure(line["step_ms"])]
        + [f"{line[key]['median']:.2f}%" for key in ("waited_percent", "store_percent")]
        for line in lines
        if "step_ms" in line
    ]
    rates = [
        [line["side"], write_figure(line["us"]), f"{line['rows_per_s']['median'] / 1e6:.2f}"]
        for line in lines
        if "us" in line
    ]
    memory = [
        [line["method"], line["side"], write_figure(line["memory_mb"])]
        for line in lines
        if "memory_mb" in line
    ]
    columns = ["method", "store", "step, ms", "blocked on the store", "reads and writes in all"]
    tables = [markdown_table(columns, steps), markdown_table(["memory bank", "µs", "million rows/s"], rates)]
    return "\n\n".join([*tables, markdown_table(["method", "actor's memory", "MB"], memory)])


def main() -> None:
    options = make_parser(__doc__, blocks=7, steps=20, repeats=50).parse_args()
    prepare_process(os.cpu_count() or 1)
    connect_cluster()
    lines = [line for method in METHODS for line in compare(method, options)]
    report(options, lines, table(lines))
    ray.shutdown()


if __name__ == "__main__":
    main()
