"""Measure the cost of the collapse monitor on a batch's embeddings, beside the step of a small encoder.

    python benchmarks/monitor.py [--batch-size 256] [--dims 128 512]

One process, one thread. A look is taken at every logged step, by default every tenth; the step is
forward and backward pass of a ResNet-10 of half width at 32 pixels in float32, without its data and
its loss. Both are the median of the process's CPU time, and take turns.
"""

import argparse
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from measuring import take_turns

import raycl
from raycl.evaluation.embedding_metrics import measure
from raycl.models.image import build_image_encoder
from raycl.training.process import prepare_process

REPEATS = 7


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--dims", type=int, nargs="+", default=[128, 512])
    options = parser.parse_args()
    prepare_process(1)
    torch.manual_seed(0)
    encoder = build_image_encoder("resnet10", image_size=32, stem="half", width=0.5)
    images = torch.rand(2 * options.batch_size, 3, 32, 32)
    pairs = {dim: F.normalize(torch.randn(2, options.batch_size, dim), dim=2) for dim in options.dims}
    sides: dict[str, Callable[[], object]] = {"step": lambda: encoder(images).square().mean().backward()}
    sides |= {f"look at dim {dim}": partial(measure, *pair) for dim, pair in pairs.items()}
    turns = take_turns(sides, REPEATS)
    looks = {name: statistics.median(turn.cpu_s for turn in own) for name, own in turns.items()}
    step = looks.pop("step")
    every = raycl.recipe("simclr").log_every_steps
    print(f"step of {options.batch_size} pairs of views: {1e3 * step:.0f} ms")
    for name, look in looks.items():
        print(f"{name}: {1e3 * look:.1f} ms, every {every} steps: {look / every / step:.2%} of a step")


if __name__ == "__main__":
    main()
