"""Outputs of runs for the report tests, in the format of real runs."""

import io
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from raycl.config.overrides import config_to_yaml
from raycl.embedding_snapshot import (
    FIRST,
    LATEST,
    EmbeddingSnapshot,
    ProbeSet,
    Similarities,
    count_cosines,
    write_probe_set,
    write_snapshot,
)
from raycl.recipes import recipe
from raycl.records import MetricsLog, write_result
from raycl.storage import Place
from tests.images import encode
from tests.settings import override_active

BEGAN = 1_790_000_000  # seconds since 1970


def line_of(step: int, **figures: Any) -> dict[str, Any]:
    """The metrics line of a step with 64 rows."""
    return {
        "step": step,
        "samples": 64 * step,
        "epoch": step // 50,
        "stage": 0,
        "workers": 2,
        "time": BEGAN + step,
        "loss": 4.0 / (1 + step / 50),
        "learning_rate": 0.1 * math.cos(step / 500),
        "samples_per_second": 800.0 + step % 7,
        "data_wait_fraction": 0.04,
        "views_fraction": 0.06,
        "keys_fraction": 0.15,
        "forward_fraction": 0.18,
        "loss_fraction": 0.03,
        "messages_fraction": 0.04,
        "backward_fraction": 0.42,
        "update_fraction": 0.02,
        "store_fraction": 0.03,
        "rest_fraction": 0.03,
        "num_rows": 64.0,
        "dim": 128.0,
        "uniformity": -2.0,
        "effective_rank": 40.0,
        "embedding_std": 0.9,
        "alignment": 0.6,
        "positive_negative_gap": 0.4,
        "seconds": step / 10,
        **figures,
    }


def evaluation(step: int, **figures: float) -> dict[str, Any]:
    """The metrics line of an evaluation."""
    return {"step": step, "samples": 64 * step, "epoch": step // 50, "stage": 0, "workers": 2, **figures}


def write_run(
    folder: Path,
    lines: list[dict[str, Any]] | None = None,
    *,
    method: str = "simclr",
    settings: Mapping[str, Any] | None = None,
    result: Mapping[str, Any] | None = None,
) -> Path:
    """Write an output: by default a finished run of 200 steps with three evaluations."""
    output = Place(str(folder))
    config = override_active(recipe(method, image_size=32), {"stages.0.batch_size": 64}, settings)
    (output / "config.yaml").write_text(config_to_yaml(config))
    (output / "data.json").write_text(json.dumps({"data": "/data/set", "num_rows": 5_000, "streamed": False}))
    if lines is None:
        evaluated = [evaluation(step, knn_top1=0.2 + step / 400) for step in (0, 100, 200)]
        steps = [line_of(step) for step in range(10, 201, 10)]
        lines = sorted([*evaluated, *steps], key=lambda line: line["step"])
    log = MetricsLog(output)
    for line in lines:
        log.write(line)
    log.flush()
    finished = {
        "status": "finished",
        "steps": 200,
        "epochs": 4,
        "seconds": 20.0,
        "samples_per_second": 640.0,
        "final": {"knn_top1": 0.7},
        "invalid_rows": {},
        "skipped": {},
    }
    write_result(output, finished if result is None else result)
    return folder


def thumbnail(number: int, kind: str = "PNG") -> bytes:
    """A small distinct picture for each number."""
    pixels = np.random.default_rng(number).integers(0, 255, (16, 16), np.uint8)
    return encode(pixels, kind)


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


def embeddings(labels: np.ndarray, *, spread: float, seed: int = 0, dim: int = 16) -> np.ndarray:
    """Unit rows [num_samples, dim]; a smaller spread moves rows with the same label closer together."""
    rng = np.random.default_rng(seed)
    middles = np.random.default_rng(99).normal(size=(int(labels.max()) + 1, dim))
    return unit(middles[labels] + spread * rng.normal(size=(len(labels), dim))).astype(np.float16)


def similarities(first: np.ndarray, second: np.ndarray) -> Similarities:
    cosines = first.astype(np.float32) @ second.astype(np.float32).T
    others = ~np.eye(len(first), dtype=bool)
    return Similarities(positives=count_cosines(cosines.diagonal()), negatives=count_cosines(cosines[others]))


def write_snapshots(
    folder: Path, *, num_samples: int = 60, labeled: bool = True, **contents: list[Any]
) -> None:
    """Write snapshots whose labels separate with training; by default of images."""
    output = Place(str(folder))
    classes = np.arange(num_samples) % 10
    shown = contents or {"image": [thumbnail(number) for number in range(num_samples)]}
    label = classes if labeled else np.full(num_samples, -1)
    write_probe_set(
        output, ProbeSet(sample_id=np.arange(num_samples), label=label, contents=shown, held_out=True)
    )
    has_keys = "document" in shown
    for name, step, spread in ((FIRST, 0, 3.0), (LATEST, 200, 0.2)):
        rows = embeddings(np.arange(num_samples) if has_keys else classes, spread=spread)
        other = embeddings(np.arange(num_samples) if has_keys else classes, spread=spread, seed=1)
        write_snapshot(
            output,
            name,
            EmbeddingSnapshot(
                step=step,
                embedding=rows,
                key=other if has_keys else None,
                similarities=similarities(rows, other),
            ),
        )


def size_of(content: bytes) -> tuple[int, int]:
    with Image.open(io.BytesIO(content)) as picture:
        return picture.size
