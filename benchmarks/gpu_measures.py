"""The measurements of ``gpu.py`` on a device, each in a process of its own."""

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from measuring import repeating, summarize

sys.path.insert(0, str(Path(__file__).parent.parent))  # the tests have a worker without Ray

PROFILED = {
    "simclr-resnet18": ("simclr", "resnet18", 32, 512),
    "moco_v2-resnet18": ("moco_v2", "resnet18", 32, 512),
    "simclr-resnet50": ("simclr", "resnet50", 224, 256),
}
STRIPS = (256, 1_024, 4_096, 16_384)
STRIPPED_ROWS = 65_536


def settings_of(recipe: str, quick: bool) -> dict[str, Any]:
    """Return what differs from the recipe: lightly's settings, bfloat16, one GPU."""
    batch = 64 if quick else 512
    settings: dict[str, Any] = {
        "gpu": not quick,
        "precision": "bfloat16",
        "stages.0.batch_size": batch,
        "stages.0.learning_rate": 0.06 * batch / 128,
        "stages.0.learning_rate_scaling": "none",
        "optimizer.weight_decay": 5e-4,
        "evaluation.num_snapshot_samples": 0,
        "checkpoints.interval_s": 60,
    }
    if recipe == "moco_v2":
        settings |= {
            "negatives.capacity": 8_192,
            "stages.0.temperature": 0.1,
            "momentum_encoder.momentum": 0.99,
        }
    if quick:
        settings |= {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.25}
    return settings


# Losses


def loss(options: argparse.Namespace, name: str, side: str, num_rows: str) -> dict[str, Any]:
    """Time a loss forward and backward, and the memory of the device above its embeddings.

    Rows are views of NT-Xent, and pairs of CLIP's loss.
    """
    import torch
    import torch.nn.functional as F

    device = this_device()
    if side == "inf_clip" and (device.type != "cuda" or not has_inf_clip()):
        return {"skipped": "needs a GPU and the package inf-cl"}
    torch.manual_seed(0)
    number = int(num_rows) // 2 if name == "nt_xent" else int(num_rows)
    inputs = F.normalize(torch.randn(2, number, 128, device=device), dim=2).unbind()
    leaves = [each.clone().requires_grad_() for each in inputs]
    return timed(LOSSES[name, side], leaves, compiled=side == "plain" and not options.quick)


def strips(options: argparse.Namespace, size: str) -> dict[str, Any]:
    """Time both losses with strips and tiles of so many rows."""
    import torch
    import torch.nn.functional as F

    import raycl.losses  # noqa: F401

    number = 512 if options.quick else STRIPPED_ROWS
    for name, module in list(sys.modules.items()):
        if name.startswith("raycl.losses"):
            for constant, value in (("STRIP_ROWS", int(size)), ("tile_size", lambda _rows: int(size))):
                if hasattr(module, constant):
                    setattr(module, constant, value)
    torch.manual_seed(0)
    inputs = F.normalize(torch.randn(2, number, 128, device=this_device()), dim=2).unbind()
    leaves = [each.clone().requires_grad_() for each in inputs]
    halves = [each[: number // 2].detach().clone().requires_grad_() for each in inputs]
    return {
        "nt_xent": timed(LOSSES["nt_xent", "raycl"], halves),
        "clip": timed(LOSSES["clip", "raycl"], leaves),
    }


def timed(function: Callable[..., Any], leaves: list[Any], *, compiled: bool = False) -> dict[str, Any]:
    import torch

    device = leaves[0].device
    function = torch.compile(function) if compiled else function

    def step() -> float:
        for leaf in leaves:
            leaf.grad = None
        began = time.perf_counter()
        function(*leaves).backward()
        synchronize(device)
        return time.perf_counter() - began

    step()
    held = reset_peak(device)
    seconds = [step() for _ in range(3)]
    return {"seconds": summarize(seconds), "memory_mb": peak(device) - held}


def raycl_nt_xent(view_a: Any, view_b: Any) -> Any:
    from raycl.losses import nt_xent

    return nt_xent(view_a, view_b, temperature=0.2)


def plain_nt_xent(view_a: Any, view_b: Any) -> Any:
    """Keep the whole matrix, as the formula is written."""
    import torch
    import torch.nn.functional as F

    views, batch = torch.cat([view_a, view_b]), len(view_a)
    logits = (views @ views.T / 0.2).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * batch, device=views.device).roll(batch))


def raycl_clip(images: Any, texts: Any) -> Any:
    from raycl.losses import clip

    return clip(images, texts, temperature=0.2)


def plain_clip(images: Any, texts: Any) -> Any:
    import torch
    import torch.nn.functional as F

    logits, pairs = images @ texts.T / 0.2, torch.arange(len(images), device=images.device)
    return (F.cross_entropy(logits, pairs) + F.cross_entropy(logits.T, pairs)) / 2


def inf_clip(images: Any, texts: Any) -> Any:
    from inf_cl import cal_flash_loss

    both = (
        cal_flash_loss(*pair, scale=5.0, head_dim=128).mean() for pair in ((images, texts), (texts, images))
    )
    return sum(both) / 2


def has_inf_clip() -> bool:
    import importlib.util

    return importlib.util.find_spec("inf_cl") is not None


LOSSES = {
    ("nt_xent", "raycl"): raycl_nt_xent,
    ("nt_xent", "plain"): plain_nt_xent,
    ("clip", "raycl"): raycl_clip,
    ("clip", "plain"): plain_clip,
    ("clip", "inf_clip"): inf_clip,
}


# Steps


def profile(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """Time steps of a worker without Ray; count kernels and waits of one; keep the profiler's table."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    recipe, encoder, size, batch = PROFILED[name]
    step = steps_of(recipe, encoder, size, batch, quick=options.quick)
    seconds = time_steps(step, 3 if options.quick else 30)
    device = this_device()
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    steps = 2 if options.quick else 5
    with profiled(activities=activities) as trace:
        for _ in range(steps):
            step()
        synchronize(device)
    events = trace.key_averages()
    on_device = device.type == "cuda"
    sort = "self_cuda_time_total" if on_device else "self_cpu_time_total"
    table = events.table(sort_by=sort, row_limit=50, max_name_column_width=80)
    (options.output / f"profile-{name}.txt").write_text(table)
    counts = {event.key: event.count / steps for event in events}
    launches = [
        number for key, number in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
    ]
    waits = {key: number for key, number in counts.items() if "Synchronize" in key}
    busy = sum(event.self_device_time_total for event in events) / steps / 1e6 if on_device else None
    median = statistics.median(seconds)
    return {
        "step_ms": summarize([1e3 * each for each in seconds]),
        "samples_per_second": batch_of(batch, options.quick) / median,
        "kernel_ms": None if busy is None else 1e3 * busy,
        "launches": sum(launches),
        "waits": waits,
        "memory_mb": peak(device),
    }


def utilization(options: argparse.Namespace, side: str) -> dict[str, Any]:
    """Return the rate of ResNet-50 in bfloat16, and its share of a large matrix product's rate here."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    size, batch = (64, 16) if options.quick else (224, 256)
    device, images = this_device(), batch_of(batch, options.quick)
    part, _, compiled = side.partition("_")
    forward_and_backward, tower = encoder_pass(size, images)
    with FlopCounterMode(display=False) as counter:
        forward_and_backward()
    flops = counter.get_total_flops()
    step = forward_and_backward
    if part == "step":
        del tower
        step = steps_of(
            "simclr", "resnet50", size, batch, quick=options.quick, compiled=bool(compiled), small=False
        )
        flops *= 2  # of two views
    elif compiled:
        tower.compile()
    seconds = statistics.median(time_steps(step, 2 if options.quick else 20))
    fastest = product_rate(device, 512 if options.quick else 8_192)
    return {
        "samples_per_second": images / seconds,
        "teraflops": flops / seconds / 1e12,
        "product_teraflops": fastest / 1e12,
        "share": flops / seconds / fastest,
        "memory_mb": peak(device),
        "torch": torch.__version__,
    }


def encoder_pass(size: int, batch: int) -> tuple[Callable[[], None], Any]:
    """Return forward and backward of a ResNet-50 alone, and the network."""
    import torch

    from raycl.models.image import build_image_encoder

    device = this_device()
    torch.backends.cudnn.benchmark = True
    tower = build_image_encoder("resnet50", image_size=size, stem="standard", width=1.0)
    tower.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=torch.channels_last)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            rows = tower(images)
        rows.float().square().mean().backward()

    return step, tower


def steps_of(
    recipe: str,
    encoder: str,
    size: int,
    batch: int,
    *,
    quick: bool,
    compiled: bool = False,
    small: bool = True,
) -> Callable[[], None]:
    """Return a function that makes a step of a worker without Ray, its views included."""
    from raycl.training.process import prepare_device
    from tests.pretended_steps import Case, Worker

    settings: dict[str, Any] = {"precision": "bfloat16", "stages.0.batch_size": batch_of(batch, quick)}
    settings |= {"encoder.name": encoder, "gpu": this_device().type == "cuda"}
    if quick and small:
        settings |= {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.25}
    worker = Worker(Case(recipe, settings, image_size=min(size, 64) if quick else size), device=this_device())
    prepare_device(worker.config, worker.device)
    if compiled:
        worker.learner.tower.compile()
    views = worker.maker.views(worker.batches(10_000))
    number = iter(range(10_000))
    return lambda: (worker.step(next(views), next(number)), None)[1]


def batch_of(batch: int, quick: bool) -> int:
    return min(batch, 16) if quick else batch


def time_steps(step: Callable[[], None], number: int) -> list[float]:
    """Return the seconds of each step, after some for warm-up."""
    device, seconds = this_device(), []
    for index in range(number + 3):
        if index == 3:
            reset_peak(device)
        synchronize(device)
        began = time.perf_counter()
        step()
        synchronize(device)
        seconds.append(time.perf_counter() - began)
    return seconds[3:]


def product_rate(device: Any, size: int) -> float:
    """Return the operations a second of a product of two matrices [size, size] in bfloat16."""
    import torch

    left, right = torch.randn(2, size, size, device=device, dtype=torch.bfloat16)
    seconds = time_steps(lambda: (left @ right, None)[1], 10)
    return 2 * size**3 / statistics.median(seconds)


# Training


def raycl_rate(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train some steps; return samples a second, where their time went, and how busy the GPU was."""
    import tempfile

    import raycl
    from raycl.records import read_metrics
    from raycl.storage import Place

    steps = 30 if options.quick else 600
    settings = settings_of(recipe, options.quick) | {
        "stages.0.epochs": None,
        "stages.0.steps": steps,
        "evaluation.every_epochs": 0,
        "log_every_steps": 5 if options.quick else 50,
    }
    config = raycl.override(raycl.recipe(recipe, image_size=32), settings)
    with tempfile.TemporaryDirectory() as folder, watch_gpu() as busy:
        raycl.train(config, data=str(options.data / "train.parquet"), output=folder, quiet=True)
        lines = [line for line in read_metrics(Place(folder)) if "loss" in line]
    lines = lines[len(lines) // 4 :]
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    fractions = {name: line_mean(lines, name) for name in lines[-1] if name.endswith("_fraction")}
    rate = (lines[-1]["step"] - lines[0]["step"]) * config.stages[0].batch_size / seconds
    return {"samples_per_second": rate, "fractions": fractions, "gpu_percent": busy()}


def line_mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


@contextmanager
def watch_gpu() -> Iterator[Callable[[], float | None]]:
    """Yield a function that returns how busy the GPU was, by nvidia-smi twice a second; None where there is none.

    The result is the mean percent of the last half, when everything ran.
    """
    command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    seen: list[float] = []

    def look() -> None:
        with suppress(OSError, subprocess.CalledProcessError, ValueError, IndexError):
            answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
            seen.append(float(answer.splitlines()[0]))

    def busy() -> float | None:
        half = seen[len(seen) // 2 :]
        return sum(half) / len(half) if half else None

    with repeating(look):
        yield busy


def this_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: Any) -> float:
    """Reset the peak of memory; return the allocated MB."""
    import torch

    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**20


def peak(device: Any) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0
