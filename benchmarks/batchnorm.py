"""SynchronizedBatchNorm beside nn.BatchNorm, which takes statistics of its own rows only: CPU time.

    python benchmarks/batchnorm.py [--json FILE]

One process on one thread, forward and backward, taking turns. The synchronized layer does all the work of one of
several workers, except that its messages (one forward, one backward) go nowhere: the rest is the cost of the layer.
"""

from functools import partial
from unittest.mock import patch

import torch
from measuring import Line, add_times, alternate, make_parser, report, table, timed
from torch import Tensor, nn

from raycl.batchnorm import synchronize

SHAPES = ((256, 64, 32, 32), (128, 128, 16, 16), (256, 512))
LAYOUTS = {"NCHW": torch.contiguous_format, "channels_last": torch.channels_last}


def step(layer: nn.Module, rows: Tensor, grad: Tensor) -> None:
    rows.grad = None
    layer.zero_grad()
    layer(rows).backward(grad)


def compare(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> list[Line]:
    """Return a line for each layer."""
    rows, grad = (torch.randn(shape).to(dtype).contiguous(memory_format=LAYOUTS[layout]) for _ in range(2))
    rows.requires_grad_()
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    layers = {"nn": kind(shape[1]), "synchronized": synchronize(kind(shape[1]))}
    sides = {side: timed(partial(step, layer, rows, grad)) for side, layer in layers.items()}
    with patch("raycl.batchnorm.synchronized.num_workers", return_value=2):
        lines = alternate(sides, 15, warmup=2)
    add_times(lines, lines[0], "cpu_ms")
    case = {"shape": " x ".join(map(str, shape)), "layout": layout}
    return [case | {"dtype": str(dtype).removeprefix("torch.")} | line for line in lines]


def main() -> None:
    options = make_parser(__doc__).parse_args()
    torch.set_num_threads(1)
    lines = [
        line
        for shape in SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for layout in (LAYOUTS if len(shape) == 4 else ["NCHW"])
        for line in compare(shape, dtype, layout)
    ]
    titles = {"shape": "shape", "dtype": "dtype", "layout": "layout", "side": "layer", "cpu_ms": "CPU ms"}
    report(options, lines, table(lines, **titles, cpu_ms_times="of nn"))


if __name__ == "__main__":
    main()
