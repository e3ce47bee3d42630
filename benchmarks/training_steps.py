"""Whole training for several benchmarks: raycl's logged steps, and lightly's way on the same images and encoder."""

import argparse
import io
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import Any

ENCODERS: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet18", "stem": "small", "width": 1.0},
    "torchvision": {"name": "resnet18", "stem": "standard", "width": 1.0},
    "small": {"name": "resnet10", "stem": "half", "width": 0.5},
    "tiny": {"name": "resnet10", "stem": "half", "width": 0.25},
}
SMALL = {f"encoder.{key}": value for key, value in ENCODERS["small"].items()}


def steps_alone(options: argparse.Namespace, *, workers: int, precision: str) -> dict[str, Any]:
    """Return the settings of a run that only makes steps, and logs each of them."""
    return {
        "workers": workers,
        "precision": precision,
        "stages.0.epochs": None,
        "stages.0.steps": options.steps,
        "stages.0.batch_size": options.batch_size,
        "evaluation.every_epochs": 0,
        "evaluation.num_snapshot_samples": 0,
        "log_every_steps": 1,
    }


def logged_steps(recipe: str, settings: dict[str, Any], data: str) -> list[dict[str, Any]]:
    """Train; return the logged lines of steps."""
    import raycl
    from raycl.records import read_metrics
    from raycl.storage import Place

    size: dict[str, Any] = {} if recipe == "two_tower" else {"image_size": 32}
    config = raycl.override(raycl.recipe(recipe, **size), settings)
    with tempfile.TemporaryDirectory() as folder:
        raycl.train(config, data=data, output=folder, quiet=True)
        return [line for line in read_metrics(Place(folder)) if "loss" in line]


@contextmanager
def open_samples(config: Any, data: str) -> Iterator[Any]:
    """Yield the rows of a run on this data, as its worker gets them."""
    from raycl.data.discovery import find_source
    from raycl.ray_runtime import connect_cluster
    from raycl.training.coordinator import start_coordinator
    from raycl.training.data_module import DataModule
    from raycl.training.preflight import column_names

    connect_cluster(None)
    with start_coordinator() as coordinator:
        yield DataModule(config, coordinator, [find_source(data, column_names(config))])


def write_images(
    path: Path, images: Sequence[Any], number: int, *, quality: int = 75, rows_a_group: int = 10_000
) -> Path:
    """Write JPEGs of uint8 [height, width, 3] to a Parquet file, again from the start until there are enough."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    files = []
    for image in images:
        stream = io.BytesIO()
        Image.fromarray(image).save(stream, "JPEG", quality=quality)
        files.append(stream.getvalue())
    with pq.ParquetWriter(path, pa.schema({"image": pa.binary()})) as writer:
        for start in range(0, number, 10_000):
            some = [files[index % len(files)] for index in range(start, min(start + 10_000, number))]
            writer.write_table(pa.table({"image": some}), row_group_size=rows_a_group)
    return path


def build_tower(encoder: str) -> Any:
    """Return encoder and projection head of 32 pixels, plain modules."""
    import torch

    from raycl.models.image import build_image_encoder
    from raycl.models.towers import build_projection_head

    network = build_image_encoder(image_size=32, **ENCODERS[encoder])
    dim = network(torch.zeros(2, 3, 32, 32)).shape[1]
    return torch.nn.Sequential(network, build_projection_head(dim, num_layers=2, hidden_dim=None, dim=128))


class LightlyImages:
    """A Parquet file of images as a map-style data set, with lightly's transform for small images."""

    def __init__(self, data: str, *, is_moco: bool) -> None:
        import pyarrow.parquet as pq
        from lightly.transforms import MoCoV2Transform, SimCLRTransform

        self._images = pq.read_table(data, columns=["image"])["image"].to_pylist()
        self._transform = (
            MoCoV2Transform(input_size=32, gaussian_blur=0.0)
            if is_moco
            else SimCLRTransform(input_size=32, cj_strength=0.5, gaussian_blur=0.0)
        )

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        with Image.open(io.BytesIO(self._images[index])) as image:
            return self._transform(image.convert("RGB"))


class LightlyTraining:
    """lightly's documented loop: its transform in a DataLoader, its loss, its momentum, SGD.

    In several processes, if ``torch.distributed`` is there: DDP, and negatives of all processes. ``queue`` is the
    size of MoCo's memory bank, 0 for SimCLR.
    """

    def __init__(
        self,
        data: str,
        *,
        queue: int,
        encoder: str,
        batch_size: int,
        temperature: float,
        learning_rate: float,
        precision: str,
        loaders: int,
    ) -> None:
        import torch
        import torch.distributed as dist
        from lightly.loss import NTXentLoss
        from lightly.models.utils import deactivate_requires_grad
        from torch.utils.data import DataLoader, DistributedSampler

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.is_moco, self.is_rounded = queue > 0, precision == "bfloat16"
        self.tower = build_tower(encoder).to(self.device)
        self.follower = deepcopy(self.tower)
        deactivate_requires_grad(self.follower)
        spread = dist.is_initialized()
        self.model = torch.nn.parallel.DistributedDataParallel(self.tower) if spread else self.tower
        bank = (queue, 128) if queue else 0
        loss = NTXentLoss(temperature=temperature, memory_bank_size=bank, gather_distributed=spread)
        self.criterion = loss.to(self.device)
        self.optimizer = torch.optim.SGD(
            self.tower.parameters(), lr=learning_rate, momentum=0.9, weight_decay=5e-4
        )
        images: Any = LightlyImages(data, is_moco=self.is_moco)
        self.loader = DataLoader(
            images,
            batch_size // (dist.get_world_size() if spread else 1),
            sampler=DistributedSampler(images) if spread else None,
            shuffle=None if spread else True,
            drop_last=True,
            num_workers=loaders or os.cpu_count() or 1,
            persistent_workers=True,
            pin_memory=self.device.type == "cuda",
        )

    def step(self, views: Any) -> None:
        import torch
        from lightly.models.utils import update_momentum

        view_a, view_b = (view.to(self.device, non_blocking=True) for view in views[:2])
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_rounded):
            if self.is_moco:
                update_momentum(self.tower, self.follower, m=0.99)
                pair = self.model(view_a), self.follower(view_b).detach()
            else:
                pair = self.model(view_a), self.model(view_b)
        value = self.criterion(pair[0].float(), pair[1].float())
        self.optimizer.zero_grad()
        value.backward()
        self.optimizer.step()

    def seconds_of(self, steps: int, *, warmup: int) -> float:
        """Make steps; return the seconds of those after ``warmup``."""
        views, began = self._batches(), 0.0
        for number in range(steps):
            if number == warmup:
                self._wait()
                began = time.perf_counter()
            self.step(next(views))
        self._wait()
        return time.perf_counter() - began

    def _batches(self) -> Iterator[Any]:
        while True:
            yield from self.loader

    def _wait(self) -> None:
        import torch

        if self.device.type == "cuda":
            torch.cuda.synchronize()
