"""Samples a second of whole training: ``raycl train simclr`` or ``moco_v2`` beside lightly in plain DDP.

    python benchmarks/train_step.py --data train.parquet [--recipe simclr|moco_v2] [--encoder resnet18|small]
        [--precision float32|bfloat16] [--batch-size 256] [--steps 20] [--repeats 3] [--json FILE]

Both train on the same images with the same encoder, batch, optimizer and precision, two processes
with half of the cores each. lightly's side is what its documentation shows: ``SimCLRTransform`` or
``MoCoV2Transform`` in a ``DataLoader``, ``NTXentLoss(gather_distributed=True)``, with a memory bank of 4,096
for MoCo, and ``DistributedDataParallel``; BatchNorm stays local there, since torch synchronizes it on CUDA only,
while raycl's is synchronized (SimCLR) or shuffled (MoCo). ``encoder`` is what neither can exceed: two
processes that do nothing but forward and backward, for MoCo another forward pass for the keys. Decoding is
within lightly's time and before raycl's, which keeps decoded images for all epochs. The sides take turns; a
rate is over all steps but the first three. ``small`` is the encoder of the CIFAR-10 run of docs/results.md.
"""

import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from measuring import add_times, alternate, apart, in_workers, make_parser, report, table
from training_steps import ENCODERS, LightlyTraining, build_tower, logged_steps, steps_alone

WARMUP_STEPS = 3
Options = dict[str, Any]


def rate(options: Options, seconds: float, batch_size: int) -> float:
    return (options["steps"] - WARMUP_STEPS) * batch_size / seconds


def raycl(options: Options) -> float:
    from argparse import Namespace

    settings = steps_alone(Namespace(**options), workers=2, precision=options["precision"])
    settings |= {f"encoder.{key}": value for key, value in ENCODERS[options["encoder"]].items()}
    lines = logged_steps(options["recipe"], settings, options["data"])
    return rate(options, lines[-1]["seconds"] - lines[WARMUP_STEPS - 1]["seconds"], options["batch_size"])


def lightly(options: Options) -> float:
    with tempfile.TemporaryDirectory() as folder:
        return rate(options, in_workers(lightly_worker, 2, options, folder)[0], options["batch_size"])


def lightly_worker(rank: int, options: Options, folder: str) -> float:
    import torch
    import torch.distributed as dist

    from raycl.gpus import available_cores

    torch.set_num_threads(max(1, available_cores() // 2))
    meeting = Path(folder, "rendezvous").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    training = LightlyTraining(
        options["data"],
        queue=4_096 if options["recipe"] == "moco_v2" else 0,
        encoder=options["encoder"],
        batch_size=options["batch_size"],
        temperature=0.2,
        learning_rate=0.06,
        precision=options["precision"],
        loaders=1,
    )
    seconds = training.seconds_of(options["steps"], warmup=WARMUP_STEPS)
    dist.destroy_process_group()
    return seconds


def encoder(options: Options) -> float:
    return sum(in_workers(encoder_worker, 2, options))


def encoder_worker(_: int, options: Options) -> float:
    import torch

    from raycl.gpus import available_cores
    from raycl.training.process import autocast, prepare_process

    prepare_process(max(1, available_cores() // 2))
    tower = build_tower(options["encoder"]).to(memory_format=torch.channels_last)
    # Two views of this process's half of the batch; of MoCo the second one has no gradient.
    images = torch.randn(options["batch_size"], 3, 32, 32).to(memory_format=torch.channels_last)
    queries, keys = images.chunk(2) if options["recipe"] == "moco_v2" else (images, None)
    began = 0.0
    for number in range(options["steps"]):
        began = time.perf_counter() if number == WARMUP_STEPS else began
        with autocast(options["precision"], images.device):
            if keys is not None:
                with torch.no_grad():
                    tower(keys)
            embedding = tower(queries)
        embedding.float().square().mean().backward()
    return rate(options, time.perf_counter() - began, options["batch_size"] // 2)


SIDES = {"raycl": raycl, "lightly": lightly, "encoder": encoder}


def main() -> None:
    flags: dict[str, Any] = {"recipe": ("simclr", "moco_v2"), "encoder": tuple(ENCODERS)}
    flags |= {"precision": ("float32", "bfloat16"), "sides": list(SIDES)}
    options = make_parser(__doc__, data=str, **flags, batch_size=256, steps=20, repeats=3).parse_args()

    def run(side: str) -> dict[str, float]:
        return {"samples_per_second": apart(SIDES[side], vars(options))}

    lines = alternate({side: partial(run, side) for side in options.sides}, options.repeats)
    add_times(lines, lines[0], "samples_per_second")
    print(f"{options.recipe}, {options.encoder}, {options.precision}, batch {options.batch_size}, 2 workers")
    titles = {"samples_per_second": "samples/s", "samples_per_second_times": f"of {options.sides[0]}"}
    report(options, lines, table(lines, side="", **titles))


if __name__ == "__main__":
    main()
