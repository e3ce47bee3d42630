"""lightly's way on one device for ``gpu.py``: rates, and a training that continues from call to call."""

import io
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_measures import Options, synchronize, watch_gpu
from training_steps import LightlyTraining

EPOCHS = 200


def new_training(options: Options, recipe: str) -> LightlyTraining:
    """Return lightly's benchmark on CIFAR-10."""
    import torch

    torch.manual_seed(0)
    torch.backends.cudnn.benchmark = True
    batch, is_moco = 64 if options["quick"] else 512, recipe == "moco_v2"
    return LightlyTraining(
        f"{options['data']}/train.parquet",
        queue=8_192 if is_moco else 0,
        encoder="tiny" if options["quick"] else "resnet18",
        batch_size=batch,
        temperature=0.1 if is_moco else 0.5,
        learning_rate=0.06 * batch / 128,
        precision="bfloat16",
        loaders=0,  # one a core
    )


def lightly_rate(options: Options, recipe: str) -> dict[str, Any]:
    """Train some steps; return samples a second, and how busy the GPU was."""
    training, steps = new_training(options, recipe), 12 if options["quick"] else 200
    warmup = steps // 4
    with watch_gpu() as busy:
        seconds = training.seconds_of(steps, warmup=warmup)
    rate = (steps - warmup) * (training.loader.batch_size or 0) / seconds
    return {"samples_per_second": rate, "gpu_percent": busy()}


def train_lightly(recipe: str, options: Options, deadline: float) -> dict[str, Any] | None:
    """Train all epochs, or as many as there is time for; a checkpoint after each. None if some are left."""
    import torch

    training, num_epochs = new_training(options, recipe), 2 if options["quick"] else EPOCHS
    schedule = torch.optim.lr_scheduler.LambdaLR(
        training.optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / num_epochs)) / 2
    )
    parts = (training.tower, training.follower, training.criterion, training.optimizer, schedule)
    saved = Path(options["output"], "runs", f"lightly_{recipe}.pt")
    saved.parent.mkdir(parents=True, exist_ok=True)
    epoch, spent_s, longest_s = 0, 0.0, 0.0
    if saved.exists():
        state = torch.load(saved, map_location=training.device, weights_only=True)
        epoch, spent_s = state["epoch"], state["spent_s"]
        for part, its_state in zip(parts, state["parts"], strict=True):
            part.load_state_dict(its_state)
    while epoch < num_epochs:
        if time.monotonic() + longest_s > deadline:
            return None
        began = time.monotonic()
        for views in training.loader:
            training.step(views)
        schedule.step()
        synchronize()
        epoch, spent_s = epoch + 1, spent_s + time.monotonic() - began
        state = {"parts": [part.state_dict() for part in parts], "epoch": epoch, "spent_s": spent_s}
        torch.save(state, saved.with_suffix(".part"))
        saved.with_suffix(".part").replace(saved)
        longest_s = max(longest_s, time.monotonic() - began)
    if time.monotonic() > deadline:
        return None
    images = num_epochs * len(training.loader) * (training.loader.batch_size or 0)
    return {
        "knn": knn(training, options["data"]),
        "training_s": spent_s,
        "samples_per_second": images / spent_s,
    }


def knn(training: LightlyTraining, data: str) -> float:
    """Return the accuracy of lightly's weighted kNN on the test set, k = 200 and t = 0.1."""
    import torch
    import torch.nn.functional as F
    from lightly.utils.benchmarking import knn_predict

    def embedded(path: str) -> tuple[Any, Any]:
        rows, labels = [], []
        for images, its_labels in plain_batches(path):
            rows.append(F.normalize(training.tower[0](images.to(training.device)), dim=1))
            labels.append(its_labels.to(training.device))
        return torch.cat(rows), torch.cat(labels)

    training.tower.eval()
    with torch.no_grad():
        bank, labels = embedded(f"{data}/train.parquet")
        rows, truth = embedded(f"{data}/test.parquet")
        settings: dict[str, Any] = {"num_classes": 10, "knn_k": 200, "knn_t": 0.1}
        answers = [knn_predict(part, bank.T, labels, **settings)[:, 0] for part in rows.split(500)]
    return float((torch.cat(answers) == truth).double().mean())


def plain_batches(path: str) -> Iterator[tuple[Any, Any]]:
    """Yield images without augmentation, normalized as lightly's transforms do, and their labels."""
    import pyarrow.parquet as pq
    import torch
    from lightly.transforms.utils import IMAGENET_NORMALIZE
    from PIL import Image
    from torchvision.transforms import v2

    normalize = v2.Normalize(IMAGENET_NORMALIZE["mean"], IMAGENET_NORMALIZE["std"])
    transform = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True), normalize])
    for batch in pq.read_table(path, columns=["image", "label"]).to_batches(500):
        images = []
        for content in batch["image"].to_pylist():
            with Image.open(io.BytesIO(content)) as image:
                images.append(transform(image.convert("RGB")))
        yield torch.stack(images), torch.tensor(batch["label"].to_pylist())
