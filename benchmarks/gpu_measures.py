"""The measurements of ``gpu.py`` on a device, each in a process of its own; ``options`` are its flags."""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import count, cycle
from pathlib import Path
from typing import Any

from measuring import FOLDER, repeating, summarize
from training_steps import ENCODERS, logged_steps

sys.path.append(str(FOLDER.parent))  # the tests have a worker without Ray

PROFILED = {
    "simclr-resnet18": ("simclr", "resnet18", 32, 512),
    "moco_v2-resnet18": ("moco_v2", "resnet18", 32, 512),
    "simclr-resnet50": ("simclr", "resnet50", 224, 256),
}
STRIPS = (256, 1_024, 4_096, 16_384)
STRIPPED_ROWS = 65_536
Options = dict[str, Any]
TINY = {f"encoder.{key}": value for key, value in ENCODERS["tiny"].items()}


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
        settings |= {"negatives.capacity": 8_192, "stages.0.temperature": 0.1}
        settings |= {"momentum_encoder.momentum": 0.99}
    return settings | (TINY if quick else {})


def time_steps(step: Callable[[], Any], number: int, *, warmup: int = 3) -> dict[str, Any]:
    """Return the milliseconds of a step after some, and the memory of the device above that held before."""
    import torch

    is_cuda, seconds, held = this_device().type == "cuda", [], 0
    for index in range(warmup + number):
        if index == warmup and is_cuda:
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
        synchronize()
        began = time.perf_counter()
        step()
        synchronize()
        seconds.append(time.perf_counter() - began)
    memory = (torch.cuda.max_memory_allocated() - held) / 2**20 if is_cuda else 0.0
    return {"step_ms": summarize([1e3 * each for each in seconds[warmup:]]), "memory_mb": memory}


# Losses


def inf_clip(images: Any, texts: Any) -> Any:
    from inf_cl import cal_flash_loss

    pairs = (images, texts), (texts, images)
    return sum(cal_flash_loss(*pair, scale=10.0, head_dim=128).mean() for pair in pairs) / 2


def loss(options: Options, name: str, side: str, num_rows: int) -> dict[str, Any]:
    """Time a loss forward and backward. Rows are views of NT-Xent, and pairs of CLIP's loss."""
    import importlib.util

    if side == "inf_clip":
        if this_device().type != "cuda" or importlib.util.find_spec("inf_cl") is None:
            return {"skipped": "needs a GPU and the package inf-cl"}
        return time_loss(inf_clip, num_rows)
    function = loss_of(name, side)
    if side == "plain" and not options["quick"]:
        import torch

        function = torch.compile(function)
    return time_loss(function, num_rows // 2 if name == "nt_xent" else num_rows)


def loss_of(name: str, side: str) -> Callable[..., Any]:
    from loss import SIDES

    return SIDES["nt_xent" if name == "nt_xent" else "bidirectional"][side][0](None)


def time_loss(function: Callable[..., Any], number: int) -> dict[str, Any]:
    import torch
    import torch.nn.functional as F

    torch.manual_seed(0)
    rows = F.normalize(torch.randn(2, number, 128, device=this_device()), dim=2).unbind()
    leaves = [each.clone().requires_grad_() for each in rows]

    def step() -> None:
        for leaf in leaves:
            leaf.grad = None
        function(*leaves).backward()

    return time_steps(step, 3, warmup=1)


def strips(options: Options, size: int) -> dict[str, Any]:
    """Time both losses with strips and tiles of so many rows."""
    import raycl.losses  # noqa: F401

    number = 512 if options["quick"] else STRIPPED_ROWS
    modules = [module for name, module in sys.modules.items() if name.startswith("raycl.losses")]
    for constant, value in (("BLOCK_ROWS", size), ("tile_size", lambda _rows: size)):
        having = [module for module in modules if hasattr(module, constant)]
        assert having, f"no loss has {constant} any more"
        for module in having:
            setattr(module, constant, value)
    sizes = {"nt_xent": number // 2, "clip": number}
    return {name: time_loss(loss_of(name, "raycl"), each) for name, each in sizes.items()}


# Steps


def profile(options: Options, name: str) -> dict[str, Any]:
    """Time steps of a worker without Ray; count kernels and waits of one; keep the profiler's table."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    recipe, encoder, size, batch = PROFILED[name]
    step = steps_of(recipe, encoder, size, batch, quick=options["quick"])
    found = time_steps(step, 3 if options["quick"] else 30)
    on_device, steps = this_device().type == "cuda", 2 if options["quick"] else 5
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_device else [])]
    with profiled(activities=activities) as trace:
        for _ in range(steps):
            step()
        synchronize()
    events = trace.key_averages()
    sort = "self_cuda_time_total" if on_device else "self_cpu_time_total"
    table = events.table(sort_by=sort, row_limit=50, max_name_column_width=80)
    Path(options["output"], f"profile-{name}.txt").write_text(table)
    counts = {event.key: event.count / steps for event in events}
    busy_ms = sum(event.self_device_time_total for event in events) / steps / 1e3
    return found | {
        "samples_per_second": 1e3 * batch_of(batch, options["quick"]) / found["step_ms"]["median"],
        "kernel_ms": busy_ms if on_device else None,
        "launches": sum(
            number for key, number in counts.items() if key.startswith(("cudaLaunchKernel", "cuLaunchKernel"))
        ),
        "waits": {key: number for key, number in counts.items() if "Synchronize" in key},
    }


def utilization(options: Options, side: str) -> dict[str, Any]:
    """Return the rate of ResNet-50 in bfloat16, and its share of a large matrix product's rate here."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    quick, (part, _, compiled) = options["quick"], side.partition("_")
    size, batch = (64, 16) if quick else (224, 256)
    step, tower = encoder_pass(size, batch)
    with FlopCounterMode(display=False) as counter:
        step()
    flops = counter.get_total_flops()
    if part == "step":
        del tower
        step = steps_of("simclr", "resnet50", size, batch, quick=quick, compiled=bool(compiled), tiny=False)
        flops *= 2  # of two views
    elif compiled:
        tower.compile()
    found = time_steps(step, 2 if quick else 20)
    seconds, fastest = found["step_ms"]["median"] / 1e3, product_rate(512 if quick else 8_192)
    return found | {
        "samples_per_second": batch / seconds,
        "teraflops": flops / seconds / 1e12,
        "product_teraflops": fastest / 1e12,
        "share": flops / seconds / fastest,
        "torch": torch.__version__,
    }


def encoder_pass(size: int, batch: int) -> tuple[Callable[[], None], Any]:
    """Return forward and backward of a ResNet-50 alone, and the network."""
    import torch

    from raycl.models.image import build_image_encoder

    device, layout = this_device(), torch.channels_last
    torch.backends.cudnn.benchmark = True
    tower = build_image_encoder("resnet50", image_size=size, stem="standard", width=1.0)
    tower.to(device).to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    images = torch.randn(batch, 3, size, size, device=device).to(memory_format=layout)

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
    tiny: bool = True,
) -> Callable[[], Any]:
    """Return a function that makes a step of a worker without Ray, its views included."""
    from raycl.training.process import prepare_device
    from tests.pretended_steps import Case, Worker

    settings: dict[str, Any] = {"precision": "bfloat16", "stages.0.batch_size": batch_of(batch, quick)}
    settings |= {"encoder.name": encoder, "gpu": this_device().type == "cuda"}
    settings |= TINY if quick and tiny else {}
    worker = Worker(Case(recipe, settings, image_size=min(size, 64) if quick else size), device=this_device())
    prepare_device(worker.config, worker.device)
    if compiled:
        worker.learner.tower.compile()
    # Made before, since random images take as long as a step.
    views, numbers = worker.maker.views(cycle(list(worker.batches(4)))), count()
    return lambda: worker.step(next(views), next(numbers))


def batch_of(batch: int, quick: bool) -> int:
    return min(batch, 16) if quick else batch


def product_rate(size: int) -> float:
    """Return the operations a second of a product of two matrices [size, size] in bfloat16."""
    import torch

    left, right = torch.randn(2, size, size, device=this_device(), dtype=torch.bfloat16)
    return 2e3 * size**3 / time_steps(lambda: left @ right, 10)["step_ms"]["median"]


# Training


def raycl_rate(options: Options, recipe: str) -> dict[str, Any]:
    """Train some steps; return samples a second, where their time went, and how busy the GPU was."""
    quick = options["quick"]
    settings = settings_of(recipe, quick) | {"stages.0.epochs": None, "evaluation.every_epochs": 0}
    settings |= {"stages.0.steps": 30 if quick else 600, "log_every_steps": 5 if quick else 50}
    with watch_gpu() as busy:
        lines = logged_steps(recipe, settings, f"{options['data']}/train.parquet")
    lines = lines[len(lines) // 4 :]
    first, last = lines[0], lines[-1]
    fractions = {
        name: statistics.fmean(line.get(name, 0.0) for line in lines)
        for name in last
        if name.endswith("_fraction")
    }
    images = (last["step"] - first["step"]) * settings["stages.0.batch_size"]
    rate = images / (last["seconds"] - first["seconds"])
    return {"samples_per_second": rate, "fractions": fractions, "gpu_percent": busy()}


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

    with repeating(look):
        yield lambda: statistics.fmean(seen[len(seen) // 2 :]) if seen else None


def this_device() -> Any:
    import torch

    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize() -> None:
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
