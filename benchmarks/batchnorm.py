"""Time SynchronizedBatchNorm against nn.BatchNorm, which takes statistics of its own rows only.

One process on one thread, forward and backward. The synchronized layer does all the work of one
of several workers, except that its messages (one forward, one backward) go nowhere: the rest
is the cost of the layer itself. ``nn`` and ``synchronized`` are medians of interleaved runs, in
milliseconds of processor time.

    python benchmarks/batchnorm.py [--json FILE]
"""

import statistics
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from measuring import make_parser, take_turns, write_json
from torch import Tensor, nn

from raycl.batchnorm import synchronize

_SHAPES = ((256, 64, 32, 32), (128, 128, 16, 16), (256, 512))
_REPETITIONS = 15


def main() -> None:
    """Print the table; write it as JSON if asked."""
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [
        _compare(shape, dtype, layout)
        for shape in _SHAPES
        for dtype in (torch.float32, torch.bfloat16)
        for layout in (("NCHW", "channels_last") if len(shape) == 4 else ("NC",))
    ]
    _print(rows)
    write_json(arguments.json, rows)


def _compare(shape: tuple[int, ...], dtype: torch.dtype, layout: str) -> dict[str, Any]:
    rows, grad = (torch.randn(shape).to(dtype) for _ in range(2))
    if layout == "channels_last":
        rows, grad = (each.contiguous(memory_format=torch.channels_last) for each in (rows, grad))
    kind = nn.BatchNorm2d if len(shape) == 4 else nn.BatchNorm1d
    plain, synchronized = kind(shape[1]), synchronize(kind(shape[1]))
    rows.requires_grad_()
    with patch("raycl.batchnorm.synchronized.num_workers", return_value=2):
        layers = {"nn": plain, "synchronized": synchronized}
        steps = {name: partial(_step, layer, rows, grad) for name, layer in layers.items()}
        turns = take_turns(steps, _REPETITIONS, warmup=2)
    first, second = (statistics.median(turn.cpu_s for turn in turns[name]) for name in layers)
    return {
        "shape": list(shape),
        "dtype": str(dtype).removeprefix("torch."),
        "layout": layout,
        "nn_ms": round(1e3 * first, 3),
        "synchronized_ms": round(1e3 * second, 3),
        "ratio": round(second / first, 3),
    }


def _step(layer: nn.Module, rows: Tensor, grad: Tensor) -> None:
    rows.grad = None
    layer.zero_grad()
    layer(rows).backward(grad)


def _print(rows: list[dict[str, Any]]) -> None:
    print(f"{'shape':20} {'dtype':9} {'layout':14} {'nn':>9} {'synchronized':>13} {'ratio':>6}")
    for row in rows:
        print(
            f"{row['shape']!s:20} {row['dtype']:9} {row['layout']:14} "
            f"{row['nn_ms']:9.2f} {row['synchronized_ms']:13.2f} {row['ratio']:6.2f}"
        )


if __name__ == "__main__":
    main()
