"""lightly's way on one device for ``gpu.py``: its transform, loss and momentum in a plain loop with a DataLoader."""

import argparse
import math
import os
import time
from collections.abc import Iterator
from typing import Any

from gpu_measures import synchronize, this_device, watch_gpu

EPOCHS = 200


def lightly_rate(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train some steps with a worker of the DataLoader a core; return samples a second."""
    training = Training(recipe, options)
    steps, ends = 12 if options.quick else 200, []
    with watch_gpu() as busy:
        while len(ends) < steps:
            for views in training.loader:
                training.step(views)
                if len(ends) in (steps // 4, steps - 1):
                    synchronize(training.device)
                ends.append(time.perf_counter())
                if len(ends) == steps:
                    break
    since = steps // 4
    return {
        "samples_per_second": (steps - 1 - since) * training.batch / (ends[-1] - ends[since]),
        "gpu_percent": busy(),
    }


def train_lightly(recipe: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Train all epochs, or as many as there is time for; a checkpoint after each. None if some are left."""
    import torch

    training = Training(recipe, options)
    saved = options.output / "runs" / f"lightly_{recipe}.pt"
    saved.parent.mkdir(parents=True, exist_ok=True)
    if saved.exists():
        training.load_state_dict(torch.load(saved, map_location=training.device, weights_only=True))
    longest = 0.0
    while training.epoch < training.num_epochs:
        if time.monotonic() + longest > deadline:
            return None
        began = time.monotonic()
        training.train_epoch()
        part = saved.with_suffix(".part")
        torch.save(training.state_dict(), part)
        part.replace(saved)
        longest = max(longest, time.monotonic() - began)
    if time.monotonic() > deadline:
        return None
    return {
        "knn": training.knn(str(options.data / "train.parquet"), str(options.data / "test.parquet")),
        "training_s": training.seconds,
        "samples_per_second": training.num_steps * training.batch / training.seconds,
    }


class Training:
    """Networks, optimizer, schedule and data of lightly's benchmark on CIFAR-10; SGD, a cosine over all epochs."""

    def __init__(self, recipe: str, options: argparse.Namespace) -> None:
        import torch
        from lightly.loss import NTXentLoss
        from lightly.models.utils import deactivate_requires_grad

        self.device, self.recipe, quick = this_device(), recipe, options.quick
        self.batch = 64 if quick else 512
        self.num_epochs = 2 if quick else EPOCHS
        torch.manual_seed(0)
        torch.backends.cudnn.benchmark = True
        self.tower, self.follower = self._network(quick), self._network(quick)
        self.follower.load_state_dict(self.tower.state_dict())
        deactivate_requires_grad(self.follower)
        bank = (8_192, 128) if self.is_moco else 0
        self.criterion = NTXentLoss(temperature=0.1 if self.is_moco else 0.5, memory_bank_size=bank).to(
            self.device
        )
        rate = 0.06 * self.batch / 128
        self.optimizer = torch.optim.SGD(self.tower.parameters(), lr=rate, momentum=0.9, weight_decay=5e-4)
        self.loader = loader_of(str(options.data / "train.parquet"), self)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda epoch: (1 + math.cos(math.pi * epoch / self.num_epochs)) / 2
        )
        self.epoch, self.num_steps, self.seconds = 0, 0, 0.0

    @property
    def is_moco(self) -> bool:
        return self.recipe == "moco_v2"

    def _network(self, quick: bool) -> Any:
        import torch

        from raycl.models.image import build_image_encoder
        from raycl.models.towers import build_projection_head

        name, stem, width = ("resnet10", "half", 0.25) if quick else ("resnet18", "small", 1.0)
        encoder = build_image_encoder(name, image_size=32, stem=stem, width=width)
        dim = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
        head = build_projection_head(dim, num_layers=2, hidden_dim=None, dim=128)
        return torch.nn.Sequential(encoder, head).to(self.device)

    def step(self, views: Any) -> None:
        import torch
        from lightly.models.utils import update_momentum

        view_a, view_b = (view.to(self.device, non_blocking=True) for view in views[:2])
        with torch.autocast(self.device.type, torch.bfloat16):
            if self.is_moco:
                update_momentum(self.tower, self.follower, m=0.99)
                pair = self.tower(view_a), self.follower(view_b).detach()
            else:
                pair = self.tower(view_a), self.tower(view_b)
            value = self.criterion(pair[0].float(), pair[1].float())
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def train_epoch(self) -> None:
        began = time.monotonic()
        for views in self.loader:
            self.step(views)
            self.num_steps += 1
        self.schedule.step()
        synchronize(self.device)
        self.epoch += 1
        self.seconds += time.monotonic() - began

    def state_dict(self) -> dict[str, Any]:
        parts = (self.tower, self.follower, self.criterion, self.optimizer, self.schedule)
        numbers = {"epoch": self.epoch, "num_steps": self.num_steps, "seconds": self.seconds}
        return {"parts": [part.state_dict() for part in parts], **numbers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        parts = (self.tower, self.follower, self.criterion, self.optimizer, self.schedule)
        for part, its_state in zip(parts, state["parts"], strict=True):
            part.load_state_dict(its_state)
        self.epoch, self.num_steps, self.seconds = (state[name] for name in ("epoch", "num_steps", "seconds"))

    def knn(self, train: str, test: str) -> float:
        """Return the accuracy of lightly's weighted kNN on the test set, k = 200 and t = 0.1."""
        import torch
        from lightly.utils.benchmarking import knn_predict

        self.tower.eval()
        bank, labels = self._embedded(train)
        rows, truth = self._embedded(test)
        correct = 0
        for part, expected in zip(rows.split(500), truth.split(500), strict=True):
            answers = knn_predict(part, bank.T, labels, num_classes=10, knn_k=200, knn_t=0.1)
            correct += int((answers[:, 0] == expected).sum())
        torch.set_grad_enabled(True)
        return correct / len(truth)

    def _embedded(self, path: str) -> tuple[Any, Any]:
        import torch
        import torch.nn.functional as F

        rows, labels = [], []
        with torch.no_grad():
            for images, its_labels in plain_batches(path):
                rows.append(F.normalize(self.tower[0](images.to(self.device)), dim=1))
                labels.append(its_labels.to(self.device))
        return torch.cat(rows), torch.cat(labels)


def loader_of(path: str, training: Training) -> Any:
    from torch.utils.data import DataLoader
    from train_step import LightlyImages

    images: Any = LightlyImages(path, is_moco=training.is_moco)
    return DataLoader(
        images,
        training.batch,
        shuffle=True,
        drop_last=True,
        num_workers=os.cpu_count() or 1,
        persistent_workers=True,
        pin_memory=training.device.type == "cuda",
    )


def plain_batches(path: str) -> Iterator[tuple[Any, Any]]:
    """Yield images without augmentation, normalized as lightly's transforms do, and their labels."""
    import io

    import pyarrow.parquet as pq
    import torch
    from lightly.transforms.utils import IMAGENET_NORMALIZE
    from PIL import Image
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize(IMAGENET_NORMALIZE["mean"], IMAGENET_NORMALIZE["std"]),
        ]
    )
    table = pq.read_table(path, columns=["image", "label"])
    for batch in table.to_batches(500):
        images = []
        for content in batch["image"].to_pylist():
            with Image.open(io.BytesIO(content)) as image:
                images.append(transform(image.convert("RGB")))
        yield torch.stack(images), torch.tensor(batch["label"].to_pylist())
