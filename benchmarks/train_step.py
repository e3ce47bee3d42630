"""Samples a second of whole training: ``raycl train simclr`` or ``moco_v2`` beside lightly in plain DDP.

Both train on the same images with the same encoder, batch, optimizer and precision, two processes
with half of the cores each. lightly's side is what its documentation shows: ``SimCLRTransform`` or
``MoCoV2Transform`` in a ``DataLoader``, ``NTXentLoss(gather_distributed=True)``, with a memory bank of 4,096
for MoCo, and ``DistributedDataParallel``; BatchNorm stays local there, since torch synchronizes it on CUDA only,
while raycl's is synchronized (SimCLR) or shuffled (MoCo). ``encoder`` is what neither can exceed: two
processes that do nothing but forward and backward, for MoCo another forward pass for the keys. Decoding is
within lightly's time and before raycl's, which keeps decoded images for all epochs. The runs are
interleaved; a run's rate is over all its steps but the first three, the figure the median of runs.
``small`` is the encoder of the CIFAR-10 run of docs/results.md.

    python benchmarks/train_step.py --data train.parquet --recipe simclr --encoder resnet18 --json step.json
"""

import argparse
import io
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from copy import deepcopy
from pathlib import Path
from typing import Any

from measuring import make_parser, run_apart, write_json

ENCODERS: dict[str, dict[str, Any]] = {
    "resnet18": {"name": "resnet18", "stem": "small", "width": 1.0},
    "small": {"name": "resnet10", "stem": "half", "width": 0.5},
}
WARMUP_STEPS = 3


def main() -> None:
    options = read_options()
    if options.side is not None:
        print(SIDES[options.side](options))
        return
    rates: dict[str, list[float]] = {side: [] for side in options.sides}
    for _ in range(options.repeats):
        for side, measured in rates.items():
            measured.append(run_side(side))
            print(f"{side:8} {measured[-1]:8.1f} samples/s", flush=True)
    medians = {side: statistics.median(measured) for side, measured in rates.items()}
    first = medians[options.sides[0]]
    compared = ", ".join(f"{side} {rate:.1f} ({first / rate:.2f})" for side, rate in medians.items())
    print(
        f"{options.recipe}, {options.encoder}, {options.precision}, batch {options.batch_size}, 2 workers; samples/s "
        f"(and {options.sides[0]}'s rate over it): {compared}"
    )
    report = {"settings": vars(options), "rates": rates, "medians": medians}
    report["machine"] = {"platform": platform.platform(), "cores": os.cpu_count()}
    write_json(options.json, report)


def read_options() -> argparse.Namespace:
    parser = make_parser(__doc__)
    parser.add_argument("--data", required=True, help="parquet file with an image column")
    parser.add_argument("--recipe", choices=["simclr", "moco_v2"], default="simclr")
    parser.add_argument("--encoder", choices=ENCODERS, default="resnet18")
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    return parser.parse_args()


def run_side(side: str) -> float:
    """Measure one side in a process of its own."""
    return run_apart(__file__, *sys.argv[1:], "--side", side)


def steps_alone(options: argparse.Namespace, *, workers: int) -> dict[str, Any]:
    """Return the settings of a run that only makes steps, and logs each of them."""
    return {
        "workers": workers,
        "precision": options.precision,
        "stages.0.epochs": None,
        "stages.0.steps": options.steps,
        "stages.0.batch_size": options.batch_size,
        "evaluation.every_epochs": 0,
        "evaluation.num_snapshot_samples": 0,
        "log_every_steps": 1,
    }


def encoder_of(options: argparse.Namespace) -> dict[str, Any]:
    return {f"encoder.{key}": value for key, value in ENCODERS[options.encoder].items()}


def run_raycl(options: argparse.Namespace) -> float:
    import raycl
    from raycl.records import read_metrics
    from raycl.storage import Place

    config = raycl.override(raycl.recipe(options.recipe, image_size=32), steps_alone(options, workers=2))
    config = raycl.override(config, encoder_of(options))
    with tempfile.TemporaryDirectory() as folder:
        raycl.train(config, data=options.data, output=folder, quiet=True)
        lines = read_metrics(Place(folder))
    seconds = lines[-1]["seconds"] - lines[WARMUP_STEPS - 1]["seconds"]
    return (options.steps - WARMUP_STEPS) * options.batch_size / seconds


def run_lightly(options: argparse.Namespace) -> float:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(lightly_worker, args=(options, folder), nprocs=2, start_method="spawn")  # type: ignore[attr-defined]
        return json.loads((Path(folder) / "rate.json").read_text())


def lightly_worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    import torch
    import torch.distributed as dist
    from lightly.loss import NTXentLoss
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from torch.nn.parallel import DistributedDataParallel

    from raycl.models.image import build_image_encoder
    from raycl.models.towers import build_projection_head
    from raycl.training.process import available_cores

    torch.set_num_threads(max(1, available_cores() // 2))
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    encoder = build_image_encoder(image_size=32, **ENCODERS[options.encoder])
    dim = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
    head = build_projection_head(dim, num_layers=2, hidden_dim=None, dim=128)
    tower = torch.nn.Sequential(encoder, head)
    is_moco = options.recipe == "moco_v2"
    model, followers = DistributedDataParallel(tower), deepcopy(tower)
    deactivate_requires_grad(followers)
    criterion = NTXentLoss(
        temperature=0.2, memory_bank_size=(4_096, 128) if is_moco else 0, gather_distributed=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    loader = lightly_loader(options)
    ends: list[float] = []
    while len(ends) < options.steps:
        for views in loader:
            with torch.autocast("cpu", torch.bfloat16, enabled=options.precision == "bfloat16"):
                if is_moco:
                    update_momentum(tower, followers, m=0.99)
                    embedding = [model(views[0]), followers(views[1]).detach()]
                else:
                    embedding = [model(view) for view in views]
                loss = criterion(embedding[0].float(), embedding[1].float())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            ends.append(time.perf_counter())
            if len(ends) == options.steps:
                break
    if rank == 0:
        seconds = ends[-1] - ends[WARMUP_STEPS - 1]
        rate = (options.steps - WARMUP_STEPS) * options.batch_size / seconds
        (Path(folder) / "rate.json").write_text(json.dumps(rate))
    dist.destroy_process_group()


def lightly_loader(options: argparse.Namespace) -> Any:
    from torch.utils.data import DataLoader, DistributedSampler

    images: Any = LightlyImages(options.data, is_moco=options.recipe == "moco_v2")
    return DataLoader(
        images,
        options.batch_size // 2,
        sampler=DistributedSampler(images),
        drop_last=True,
        num_workers=1,
        persistent_workers=True,
    )


def run_encoder(options: argparse.Namespace) -> float:
    import torch.multiprocessing as mp

    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(encoder_worker, args=(options, folder), nprocs=2, start_method="spawn")  # type: ignore[attr-defined]
        return sum(json.loads(path.read_text()) for path in Path(folder).iterdir())


def encoder_worker(rank: int, options: argparse.Namespace, folder: str) -> None:
    import torch

    from raycl.models.image import build_image_encoder
    from raycl.models.towers import build_projection_head
    from raycl.training.process import autocast, available_cores, prepare_process

    prepare_process(max(1, available_cores() // 2))
    encoder = build_image_encoder(image_size=32, **ENCODERS[options.encoder])
    dim = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
    model = torch.nn.Sequential(encoder, build_projection_head(dim, num_layers=2, hidden_dim=None, dim=128))
    model = model.to(memory_format=torch.channels_last)
    # Two views of this process's half of the batch; of MoCo the second one has no gradient.
    images = torch.randn(options.batch_size, 3, 32, 32).to(memory_format=torch.channels_last)
    queries, keys = images.chunk(2) if options.recipe == "moco_v2" else (images, None)
    ends: list[float] = []
    for _ in range(options.steps):
        with autocast(options.precision, images.device):
            if keys is not None:
                with torch.no_grad():
                    model(keys)
            embedding = model(queries)
        embedding.float().square().mean().backward()
        ends.append(time.perf_counter())
    seconds = ends[-1] - ends[WARMUP_STEPS - 1]
    rate = (options.steps - WARMUP_STEPS) * options.batch_size / 2 / seconds
    (Path(folder) / f"{rank}.json").write_text(json.dumps(rate))


class LightlyImages:
    """The same parquet file as a map-style data set with lightly's transform for small images."""

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


SIDES = {"raycl": run_raycl, "lightly": run_lightly, "encoder": run_encoder}

if __name__ == "__main__":
    main()
