"""The collapse monitor's look at a batch of embeddings, beside the step of a small encoder: CPU time.

    python benchmarks/monitor.py [--batch-size 256] [--dims 128 512] [--json FILE]

One process, one thread, taking turns. A look is taken at every logged step, by default every tenth; the step is
forward and backward pass of a ResNet-10 of half width at 32 pixels in float32, without its data and its loss.
"""

from functools import partial

import torch
import torch.nn.functional as F
from measuring import alternate, make_parser, middle, report, table, timed

import raycl
from raycl.evaluation.embedding_metrics import measure
from raycl.models.image import build_image_encoder
from raycl.training.process import prepare_process


def main() -> None:
    options = make_parser(__doc__, batch_size=256, dims=[128, 512]).parse_args()
    prepare_process(1)
    torch.manual_seed(0)
    encoder = build_image_encoder("resnet10", image_size=32, stem="half", width=0.5)
    images = torch.rand(2 * options.batch_size, 3, 32, 32)
    pairs = {dim: F.normalize(torch.randn(2, options.batch_size, dim), dim=2) for dim in options.dims}
    sides = {"step": timed(lambda: encoder(images).square().mean().backward())}
    sides |= {f"look at dim {dim}": timed(partial(measure, *pair)) for dim, pair in pairs.items()}
    lines = alternate(sides, 7, warmup=1)
    every, step = raycl.recipe("simclr").log_every_steps, middle(lines[0]["cpu_ms"])
    for look in lines[1:]:
        look["share"] = f"{middle(look['cpu_ms']) / every / step:.2%}"
    titles = {"side": f"{options.batch_size} pairs", "cpu_ms": "CPU ms"}
    report(options, lines, table(lines, **titles, share=f"of a step, every {every} steps"))


if __name__ == "__main__":
    main()
