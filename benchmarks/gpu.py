"""What a GPU does: CIFAR-10 to lightly's published accuracy, samples a second, and losses of very large batches.

    python benchmarks/gpu.py --data cifar10 --output gpu [--minutes 9] [--parts loss rate simclr moco_v2] [--quick]

A call takes at most ``--minutes`` and says what is left; the same command goes on from there, also in the middle
of a training run. ``loss``: NT-Xent and its gradient over 32k to 512k views of 128 numbers on the device, beside
the compiled plain loss as long as that fits. ``rate``: samples a second of training and how busy the GPU is, beside
lightly's way in one process with a DataLoader, its networks in torch's usual layout. ``simclr`` and ``moco_v2``:
ResNet-18, batch 512, 200 epochs at the settings of lightly's benchmark (rate 0.06 times batch / 128, weight decay
5e-4, kNN with k = 200 and t = 0.1), which reached 0.848 and 0.847 at its best epoch on the test set; here the last epoch counts. ``--quick`` tries all
of it in small, also on a CPU.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measuring import describe_machine, summarize

PUBLISHED = {"simclr": 0.848, "moco_v2": 0.847}
LARGEST_PLAIN = 65_536  # views; their matrix of float32 takes 16 GiB, and autograd keeps two
SPARE_S = 45.0  # for a checkpoint, and the end of a run


def main() -> None:
    options = read_options()
    if options.one is not None:
        print(json.dumps(ONES[options.one[0]](options, *options.one[1:])))
        return
    options.output.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + 60 * options.minutes
    for part in options.parts:
        for name, measure in tasks(part, options).items():
            path = options.output / f"{name}.json"
            if path.exists():
                print(f"{name}: there already", flush=True)
            elif time.monotonic() > deadline - SPARE_S:
                print(f"{name}: no time left; call again")
            elif found := measure(deadline):
                path.write_text(json.dumps(found | {"machine": describe_machine()}, indent=2) + "\n")
                print(f"{name}: {json.dumps(found)}", flush=True)
            else:
                print(f"{name}: begun; call again")


Measure = Callable[[float], dict[str, Any] | None]


def tasks(part: str, options: argparse.Namespace) -> dict[str, Measure]:
    """Return what a part consists of, by the names of its results."""
    if part == "loss":
        sizes = (256, 512) if options.quick else (32_768, 65_536, 131_072, 262_144, 524_288)
        cells = [
            (side, size)
            for size in sizes
            for side in ("raycl", "plain")
            if side == "raycl" or size <= LARGEST_PLAIN
        ]
        return {f"loss-{side}-{size}": apart(options, "loss", side, str(size)) for side, size in cells}
    if part == "rate":
        sides = [(side, recipe) for recipe in PUBLISHED for side in ("raycl", "lightly")]
        return {f"rate-{side}-{recipe}": apart(options, f"{side}_rate", recipe) for side, recipe in sides}
    return {part: lambda deadline: train(part, options, deadline)}


def apart(options: argparse.Namespace, *one: str) -> Measure:
    """Measure in a process of its own, whose memory is its own."""

    def measure(deadline: float) -> dict[str, Any] | None:
        command = [sys.executable, __file__, "--one", *one, "--data", str(options.data)]
        command += ["--output", str(options.output), *(["--quick"] if options.quick else [])]
        left = max(1.0, deadline - time.monotonic())
        try:
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, timeout=left)
        except subprocess.TimeoutExpired:
            return None
        return json.loads(done.stdout.splitlines()[-1])

    return measure


def loss(options: argparse.Namespace, side: str, num_views: str) -> dict[str, Any]:
    """Time NT-Xent forward and backward, and the memory of the device above its embeddings."""
    import torch
    import torch.nn.functional as F

    from raycl.losses import nt_xent

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    view_a, view_b = F.normalize(torch.randn(2, int(num_views) // 2, 128, device=device), dim=2)
    view_a.requires_grad_()
    view_b.requires_grad_()
    function = nt_xent if side == "raycl" else torch.compile(plain_nt_xent, disable=options.quick)

    def step() -> float:
        view_a.grad = view_b.grad = None
        began = time.perf_counter()
        value = function(view_a, view_b, temperature=0.2)
        value.backward()
        synchronize(device)
        return time.perf_counter() - began

    step()
    held = reset_peak(device)
    seconds = [step() for _ in range(3)]
    return {"seconds": summarize(seconds), "memory_mb": peak(device) - held}


def plain_nt_xent(view_a: Any, view_b: Any, *, temperature: float) -> Any:
    """Hold the whole matrix, as the formula is written."""
    import torch
    import torch.nn.functional as F

    views, batch = torch.cat([view_a, view_b]), len(view_a)
    logits = (views @ views.T / temperature).fill_diagonal_(-torch.inf)
    return F.cross_entropy(logits, torch.arange(2 * batch, device=views.device).roll(batch))


def synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(device: Any) -> float:
    """Forget the peak of memory so far; return what is held, in MB."""
    import torch

    if device.type != "cuda":
        return 0.0
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated() / 2**20


def peak(device: Any) -> float:
    import torch

    return torch.cuda.max_memory_allocated() / 2**20 if device.type == "cuda" else 0.0


def settings_of(recipe: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what differs from the recipe: lightly's settings, bfloat16, one GPU."""
    batch = 64 if options.quick else 512
    settings: dict[str, Any] = {
        "gpu": not options.quick,
        "precision": "bfloat16",
        "stages.0.batch_size": batch,
        "stages.0.learning_rate": 0.06 * batch / 128,
        "stages.0.learning_rate_scaling": "none",
        "optimizer.weight_decay": 5e-4,
        "evaluation.portrait": 0,
        "checkpoints.every_s": 60,
    }
    if recipe == "moco_v2":
        settings |= {
            "negatives.capacity": 8_192,
            "stages.0.temperature": 0.1,
            "momentum_encoder.momentum": 0.99,
        }
    if options.quick:
        settings |= {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.25}
    return settings


def train(recipe: str, options: argparse.Namespace, deadline: float) -> dict[str, Any] | None:
    """Train until the run is over or the time; then judge. None if the run must go on in another call."""
    output = options.output / "runs" / recipe
    train_set, test_set = (str(options.data / f"{name}.parquet") for name in ("train", "test"))
    epochs = ["--steps", "4"] if options.quick else ["--epochs", "200"]
    flags = [f"--set={name}={value}" for name, value in settings_of(recipe, options).items() if name != "gpu"]
    gpu = [] if options.quick else ["--gpu"]
    resume = ["--resume"] if (output / "config.yaml").exists() else []
    began = time.monotonic()
    run = subprocess.Popen(
        [
            *raycl("train", recipe),
            "--data",
            train_set,
            "--output",
            str(output),
            *epochs,
            *flags,
            *gpu,
            *resume,
        ]
    )
    try:
        run.wait(max(1.0, deadline - SPARE_S - time.monotonic()))
    except subprocess.TimeoutExpired:
        run.send_signal(signal.SIGTERM)  # it saves first
        try:
            status = run.wait(SPARE_S)
        except subprocess.TimeoutExpired:
            run.kill()
            status = run.wait()
        if status != 128 + signal.SIGTERM:
            sys.exit(f"{recipe} did not save when its time was over: its last checkpoint is older")
        return None
    if run.returncode:
        sys.exit(f"training {recipe} failed")
    if time.monotonic() > deadline - SPARE_S:
        return None  # --resume of a run that is over only judges
    judge = [*raycl("evaluate", "knn"), "--run", str(output), "--train", train_set, "--test", test_set, *gpu]
    judge += ["--set", "evaluation.k=200", "--set", "evaluation.temperature=0.1"]
    judged = subprocess.run(judge, check=True, stdout=subprocess.PIPE, text=True)
    result = json.loads((output / "result.json").read_text())
    return {
        "knn": json.loads(judged.stdout.splitlines()[-1]),
        "published": PUBLISHED[recipe],
        "training_s": result["seconds"],
        "samples_per_second": result["samples_per_second"],
        "last_call_s": time.monotonic() - began,
    }


def raycl(*words: str) -> list[str]:
    return [str(Path(sys.executable).parent / "raycl"), *words]


def raycl_rate(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train some steps; return samples a second, where their time went, and how busy the GPU was."""
    import tempfile

    import raycl
    from raycl.records import read_metrics
    from raycl.storage import Place

    steps = 12 if options.quick else 400
    settings = settings_of(recipe, options)
    settings |= {
        "stages.0.epochs": None,
        "stages.0.steps": steps,
        "evaluation.every_epochs": 0,
        "log_every_steps": 1,
    }
    config = raycl.override(raycl.recipe(recipe, image_size=32), settings)
    with tempfile.TemporaryDirectory() as folder, Utilization() as gpu:
        raycl.train(config, data=str(options.data / "train.parquet"), output=folder, quiet=True)
        lines = [line for line in read_metrics(Place(folder)) if "loss" in line][steps // 4 :]
    seconds = lines[-1]["seconds"] - lines[0]["seconds"]
    fractions = {name: line_mean(lines, name) for name in lines[-1] if name.endswith("_fraction")}
    rate = (len(lines) - 1) * config.stages[0].batch_size / seconds
    return {"samples_per_second": rate, "fractions": fractions, "gpu_percent": gpu.busy()}


def line_mean(lines: list[dict[str, Any]], name: str) -> float:
    return sum(line.get(name, 0.0) for line in lines) / len(lines)


def lightly_rate(options: argparse.Namespace, recipe: str) -> dict[str, Any]:
    """Train as lightly's benchmark does, with a worker of the DataLoader a core; return samples a second."""
    import torch
    from lightly.loss import NTXentLoss
    from lightly.models.utils import deactivate_requires_grad, update_momentum
    from torch.utils.data import DataLoader
    from train_step import LightlyImages

    from raycl.models.heads import build_projection_head
    from raycl.models.images import build_image_encoder

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    is_moco, batch = recipe == "moco_v2", 64 if options.quick else 512
    shape = {"stem": "half", "width": 0.25} if options.quick else {"stem": "small", "width": 1.0}

    def make() -> Any:
        name = "resnet10" if options.quick else "resnet18"
        encoder = build_image_encoder(name, image_size=32, **shape)
        dim = encoder(torch.zeros(2, 3, 32, 32)).shape[1]
        head = build_projection_head(dim, num_layers=2, hidden_dim=None, dim=128)
        return torch.nn.Sequential(encoder, head).to(device)

    tower, follower = make(), make()
    deactivate_requires_grad(follower)
    criterion = NTXentLoss(temperature=0.2, memory_bank_size=(8_192, 128) if is_moco else 0).to(device)
    optimizer = torch.optim.SGD(tower.parameters(), lr=0.06, momentum=0.9, weight_decay=5e-4)
    images: Any = LightlyImages(str(options.data / "train.parquet"), is_moco=is_moco)
    loader = DataLoader(
        images,
        batch,
        shuffle=True,
        drop_last=True,
        num_workers=os.cpu_count() or 1,
        persistent_workers=True,
        pin_memory=device.type == "cuda",
    )
    steps, ends = 12 if options.quick else 200, []
    with Utilization() as gpu:
        while len(ends) < steps:
            for views in loader:
                view_a, view_b = (view.to(device, non_blocking=True) for view in views[:2])
                with torch.autocast(device.type, torch.bfloat16):
                    if is_moco:
                        update_momentum(tower, follower, m=0.99)
                    pair = tower(view_a), follower(view_b).detach() if is_moco else tower(view_b)
                    value = criterion(pair[0].float(), pair[1].float())
                optimizer.zero_grad()
                value.backward()
                optimizer.step()
                if len(ends) in (steps // 4, steps - 1):
                    synchronize(device)
                ends.append(time.perf_counter())
                if len(ends) == steps:
                    break
    since = steps // 4
    return {
        "samples_per_second": (steps - 1 - since) * batch / (ends[-1] - ends[since]),
        "gpu_percent": gpu.busy(),
    }


class Utilization:
    """How busy the GPU is, asked of nvidia-smi twice a second; nothing where there is none."""

    def __init__(self) -> None:
        self._seen: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> "Utilization":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def busy(self) -> float | None:
        """Return the mean percent of the last half, when everything ran."""
        half = self._seen[len(self._seen) // 2 :]
        return sum(half) / len(half) if half else None

    def _look(self) -> None:
        command = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
        while not self._over.wait(0.5):
            try:
                told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
                self._seen.append(float(told.splitlines()[0]))
            except (OSError, subprocess.CalledProcessError, ValueError, IndexError):
                return


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", type=Path, required=True, help="folder with train.parquet and test.parquet")
    parser.add_argument("--output", type=Path, default=Path("gpu"), help="folder of results and runs")
    parser.add_argument("--minutes", type=float, default=9.0, help="of this call")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--quick", action="store_true", help="small sizes, also without a GPU")
    parser.add_argument("--one", nargs="+", help=argparse.SUPPRESS)
    return parser.parse_args()


PARTS = ("loss", "rate", "simclr", "moco_v2")
ONES = {"loss": loss, "raycl_rate": raycl_rate, "lightly_rate": lightly_rate}

if __name__ == "__main__":
    main()
