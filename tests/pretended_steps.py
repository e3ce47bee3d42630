"""Steps of every recipe on a pretended GPU: the loop of a worker without Ray."""

import argparse
import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from raycl.config import RunConfig
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch
from raycl.data.texts import TokenLists, Tokens
from raycl.losses.logq import Frequencies
from raycl.models.build import build_towers
from raycl.recipes import recipe
from raycl.tokenization import Vocabulary
from raycl.training.step import StepOutput, train_step
from raycl.training.stores import build_store
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.transforms import build_transform
from raycl.training.views import ViewMaker
from tests.pretend_gpu import CUDA, Trace, is_on_device, pretend_gpu
from tests.pretend_nccl import pretend_nccl
from tests.settings import override_active

PARTS = ("views", "step")
STEPS = 3
ROWS = 32  # rows in the batch of a worker
NUM_SAMPLES = 6 * ROWS
SMALL = {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.125}
TEXTS = {"encoder.kwargs": {"dim": 32, "hidden_dim": 32}, "projection_head.dim": 32}
QUEUE = {"batchnorm_groups": 4, "negatives.capacity": 2 * ROWS}
CHUNKS = {"stages.0.chunk_size": 16}
VIEWS = {"augment.views": [{"count": 3}, {"count": 2, "size": 8, "crop_scale": [0.05, 0.4]}]}
FEW_VIEWS = {"augment.views": [{"count": 2}, {"count": 1, "size": 8}]}
VIT = {"encoder.width": 0.125, "projection_head.hidden_dim": 32, "prediction_head.hidden_dim": 32}
CLIPPED = {"optimizer.max_grad_norm": 0.05}


@dataclass(frozen=True)
class Case:
    """A recipe and its changed settings."""

    recipe: str
    settings: dict[str, Any] = field(default_factory=dict)
    explicit: bool = False  # pairs with explicit negatives, and separate ids of queries and documents
    image_size: int = 32
    num_texts: int = 2**40  # the size of the vocabulary of random texts


CASES = {
    "simclr": Case("simclr", SMALL),
    "simclr bfloat16": Case("simclr", SMALL | {"precision": "bfloat16"}),
    "simclr lars": Case("simclr", SMALL | {"optimizer.name": "lars"}),
    "simclr muon": Case("simclr", SMALL | {"optimizer.name": "muon"}),
    "simclr learned temperature": Case("simclr", SMALL | {"learn_temperature": True}),
    "simclr clipped": Case("simclr", SMALL | CLIPPED),
    "simclr averaged": Case("simclr", SMALL | {"ema_decay": 0.2}),
    "simclr blur": Case("simclr", SMALL | {"augment.blur": 0.5}),
    "simclr chunks": Case("simclr", SMALL | CHUNKS),
    "simclr chunks, group norm": Case("simclr", SMALL | CHUNKS | {"batchnorm": "group"}),
    "simclr chunks, bfloat16": Case("simclr", SMALL | CHUNKS | {"precision": "bfloat16"}),
    "simclr views": Case("simclr", SMALL | VIEWS),
    "simclr views, chunks": Case("simclr", SMALL | FEW_VIEWS | CHUNKS),
    "simclr hinge": Case("simclr", SMALL | {"stages.0.loss": "hinge", "stages.0.hardest_negative": True}),
    "simclr supcon": Case("simclr", SMALL | {"stages.0.loss": "supcon"}),
    "simclr dclw": Case("simclr", SMALL | {"stages.0.loss": "dclw"}),
    "simclr poly_view": Case(
        "simclr", SMALL | {"stages.0.loss": "poly_view", "augment.views": [{"count": 4}]}
    ),
    "sogclr": Case("sogclr", SMALL),
    "simclr shuffled": Case("simclr", SMALL | {"batchnorm": "shuffled", "batchnorm_groups": 4}),
    "moco_v1": Case("moco_v1", SMALL | QUEUE),
    "moco_v2": Case("moco_v2", SMALL | QUEUE),
    "moco_v2 chunks": Case("moco_v2", SMALL | QUEUE | CHUNKS),
    "moco_v2 views": Case("moco_v2", SMALL | QUEUE | VIEWS),
    "moco_v2 in batch": Case(
        "moco_v2",
        SMALL | {"negatives.capacity": 2 * ROWS, "batchnorm": "synchronized", "negatives.in_batch": True},
    ),
    # Not AdamW, which moves a weight as far for a gradient of rounding size.
    "moco_v3": Case("moco_v3", VIT | {"optimizer.name": "sgd"}),
    "nnclr": Case(
        "nnclr",
        SMALL
        | {
            "projection_head.hidden_dim": 32,
            "prediction_head.hidden_dim": 32,
            "negatives.capacity": 2 * ROWS,
        },
    ),
    "instance_discrimination": Case("instance_discrimination", SMALL | {"negatives.num_negatives": 20}),
    "simcse": Case("simcse", TEXTS),
    "simcse chunks": Case("simcse", TEXTS | CHUNKS),
    "esimcse": Case("esimcse", TEXTS | {"negatives.capacity": 2 * ROWS}),
    "two_tower": Case("two_tower", TEXTS),
    "two_tower chunks": Case("two_tower", TEXTS | CHUNKS),
    "two_tower learned temperature": Case("two_tower", TEXTS | {"learn_temperature": True}),
    "two_tower negatives, ids": Case("two_tower", TEXTS, explicit=True),
    "clip": Case(
        "clip", SMALL | {"text_encoder.kwargs": {"dim": 32, "hidden_dim": 32}, "projection_head.dim": 32}
    ),
}


def configuration(case: Case, workers: int = 1) -> RunConfig:
    """Return the configuration of a case for a number of workers."""
    settings = {
        "workers": workers,
        "gpu": True,
        "precision": "float32",
        "stages.0.batch_size": ROWS * workers,
        "bank.location": "worker",
    }
    return override_active(recipe(case.recipe, image_size=case.image_size), settings, case.settings)


class Worker:
    """Learner, views and store, as in a worker of Ray Train."""

    def __init__(self, case: Case, workers: int = 1, device: torch.device = CUDA) -> None:
        self.case, self.config, self.device = case, configuration(case, workers), device
        self.vocabulary = Vocabulary.stand_in() if self.config.has_texts else None
        towers = build_towers(self.config, self.vocabulary).to(device)
        if self.config.data.kind in ("image", "image_text"):
            towers.to(memory_format=torch.channels_last)
        self.learner = TrainState.build(self.config, towers, num_samples=NUM_SAMPLES)
        self.learner.set_embed_config(EmbedConfig.of(self.config, self.stage))
        transform = build_transform(
            self.config, None if self.vocabulary is None else self.vocabulary.tokenizer
        )
        self.maker = ViewMaker.of(self.config, transform, device)
        self.store = build_store(self.config, None, np.arange(NUM_SAMPLES), device)
        self.frequencies: Frequencies | None = None

    @property
    def stage(self) -> Any:
        return self.config.stages[0]

    def batches(self, number: int) -> Iterator[Batch]:
        rows = self.stage.batch_size // self.config.workers
        draw = partial(
            batch, self.config, explicit=self.case.explicit, rows=rows, num_texts=self.case.num_texts
        )
        return (draw(step) for step in range(number))

    def weights(self) -> list[torch.Tensor]:
        """Return all learned parameters."""
        modules = [self.learner.tower, self.learner.prediction_head, self.learner.temperature]
        return [each.detach() for module in modules if module is not None for each in module.parameters()]

    def update_since(self, before: list[torch.Tensor]) -> torch.Tensor:
        """Return the change of all learned parameters, on the CPU."""
        return torch.cat([(b - a).flatten().cpu() for a, b in zip(before, self.weights(), strict=True)])

    def step(self, views: Any, step: int, *, is_watched: bool = False) -> StepOutput:
        contrast = self.learner.objective(
            self.config,
            self.stage,
            hinge_weight=self.stage.hinge_weight,
            num_samples=NUM_SAMPLES,
            frequencies=self.frequencies,
        )
        return train_step(
            self.learner,
            self.store,
            contrast,
            views,
            step=step,
            learning_rate=0.01,
            momentum=0.9,
            precision=self.config.precision,  # named in each case
            is_watched=is_watched,
        )


def batch(
    config: RunConfig, step: int, *, explicit: bool = False, rows: int = ROWS, num_texts: int = 2**40
) -> Batch:
    """Return random rows for this configuration."""
    rng = np.random.default_rng(step)
    texts = partial(_texts, rng, num_texts)
    contents: dict[str, Any] = {}
    kind, size = config.data.kind, config.data.resolved_decode_size
    if kind in ("image", "image_text"):
        images = rng.integers(0, 256, (rows, size, size, 3), dtype=np.uint8)
        contents["image"] = Pixels(images, np.ones(rows, np.float32))
    if kind in ("text", "image_text"):
        contents["text" if kind == "text" else "caption"] = TokenLists(texts(rows), np.ones(rows, np.int64))
    if kind == "pairs":
        contents |= {"query": texts(rows), "document": texts(rows)}
    if explicit:
        contents["negatives"] = TokenLists(texts(2 * rows), np.full(rows, 2))
        contents["document_id"] = np.arange(rows)
        contents["query_id"] = np.arange(rows) // 2
    if config.data.columns.weight is not None:
        contents["weight"] = rng.integers(0, 4, rows).astype(np.float64)
    ids = np.arange(rows, dtype=np.int64) + (step % 3) * rows
    return Batch(contents=contents, sample_id=ids, label=np.arange(rows) % 4, epoch=0)


def _texts(rng: np.random.Generator, num_texts: int, number: int) -> Tokens:
    lengths = rng.integers(2, 9, number)
    return Tokens(
        rng.integers(5, 60, lengths.sum()).astype(np.int32), lengths, rng.integers(0, num_texts, number)
    )


@dataclass(frozen=True)
class Counted:
    """Traces of the last views and their step, and the result of all steps."""

    views: Trace
    step: Trace
    losses: list[float]
    updates: list[torch.Tensor]  # of all weights, by each step


@contextlib.contextmanager
def pretended(workers: int = 1) -> Iterator[Trace]:
    """Pretend a GPU and a number of workers."""
    with pretend_gpu() as trace, pretend_nccl(workers, id_distance=NUM_SAMPLES // 2):
        yield trace


def count(case: Case, workers: int) -> Counted:
    """Run several steps on the pretended GPU and return the counts of the last one."""
    with pretended(workers) as trace:
        worker = Worker(case, workers)
        found, losses, updates = {}, [], []
        # One more than used: the next batch is sent together with the current views.
        views_of = worker.maker.views(worker.batches(STEPS + 1))
        for step in range(STEPS):
            torch.manual_seed(step)
            before = [each.clone() for each in worker.weights()]
            trace.clear()
            views = next(views_of)
            found["views"] = _copied(trace)
            trace.clear()
            losses.append(worker.step(views, step).loss)
            found["step"] = _copied(trace)
            trace.clear()
            updates.append(worker.update_since(before))
        assert all(map(is_on_device, worker.weights())), "a weight is not on the device"
    return Counted(**found, losses=losses, updates=updates)


def steps_on(device: torch.device, case: Case) -> tuple[list[float], list[torch.Tensor]]:
    """Run the same steps on a device that is not pretended; return their losses and updates of all weights."""
    worker = Worker(case, device=device)
    losses, updates = [], []
    for step, views in enumerate(worker.maker.views(worker.batches(STEPS))):
        torch.manual_seed(step)
        before = [each.clone() for each in worker.weights()]
        losses.append(worker.step(views, step).loss)
        updates.append(worker.update_since(before))
    assert all(each.device.type == device.type for each in worker.weights())
    return losses, updates


def _copied(trace: Trace) -> Trace:
    copy = Trace()
    copy.waits, copy.launches, copy.pageable = trace.waits, trace.launches, trace.pageable
    return copy


Counts = dict[str, list[int]]  # for "views" and "step": waits, copies from pageable memory, launches


def count_all() -> dict[str, Counts | str]:
    """Return the counts of each case with 1 and 2 workers, or its error."""
    found: dict[str, Counts | str] = {}
    for name, case in CASES.items():
        for workers in (1, 2):
            try:
                counted = count(case, workers)
            except Exception as error:
                found[f"{name}|{workers}"] = f"{type(error).__name__}: {error}"
            else:
                found[f"{name}|{workers}"] = {part: list(getattr(counted, part).counts) for part in PARTS}
    return found


def table(counts: dict[str, Counts | str]) -> str:
    """Return the counts as a Markdown table."""
    lines = [
        "| recipe | workers | waits: views | waits: step | launches: views | launches: step |",
        "|---|---|---|---|---|---|",
    ]
    for name, found in counts.items():
        cells = [
            "fails" if isinstance(found, str) else str(found[part][place])
            for place in (0, 2)
            for part in PARTS
        ]
        lines.append(f"| {' | '.join([*name.split('|'), *cells])} |")
    return "\n".join(lines)


def main() -> None:
    """Print the counts of all cases as Markdown, or all lines that wait in any of them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("names", nargs="*", help="cases whose waits are to be listed by line")
    options = parser.parse_args()
    if options.json:
        lines = (f"{json.dumps(name)}: {json.dumps(counts)}" for name, counts in count_all().items())
        print("{\n" + ",\n".join(lines) + "\n}")
    elif not options.names:
        print(table(count_all()))
    for name in options.names:
        for workers in (1, 2):
            counted = count(CASES[name], workers)
            for part in PARTS:
                trace = getattr(counted, part)
                print(f"{name}, {workers} workers, {part}: {trace.counts}")
                for (line, why), number in sorted(trace.waits.items()):
                    print(f"    {number:3} x {why:16} {line}")


if __name__ == "__main__":
    main()
