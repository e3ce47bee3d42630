"""A loss, forward and backward: raycl beside lightly, open_clip's way and the plain formula.

    python benchmarks/loss.py [--loss nt_xent|hinge|bidirectional|queue] [--sizes 1024 4096] [--dims 128 512]
        [--num-negatives 65536] [--memory-gb 20] [--quick] [--json FILE]

The hinge uses the hardest negative in row and column; lightly has none. The bidirectional cross-entropy stands
beside the arithmetic of open_clip's loss. ``queue`` is InfoNCE of 256 queries over a queue (MoCo), whose gradient is
the queries' alone; lightly normalizes its rows, copies its queue and writes the keys to it as part of its loss.

Time: one process, one thread, taking turns. Memory: a fresh process each, its peak above its memory before the loss.
A loss that would take more than ``--memory-gb`` is skipped. The allocator is left as it comes, for all of them.
"""

import argparse
import math
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from measuring import Line, add_times, alternate, apart, cost, make_parser, report, table, timed
from torch import Tensor

from raycl.losses import clip, hinge, info_nce, nt_xent

TEMPERATURE, QUEUE_TEMPERATURE, MARGIN = 0.1, 0.07, 0.2
Loss = Callable[..., Tensor]


def plain_nt_xent(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Hold the whole matrix; one cross entropy."""
    rows = torch.cat([view_a, view_b])
    logits = (rows @ rows.T / TEMPERATURE).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(rows), device=rows.device).roll(len(view_a)))


def plain_hinge(query: Tensor, key: Tensor) -> Tensor:
    """Hold the whole matrix; the hardest negative in each row and column."""
    similarity = query @ key.T
    others = similarity.masked_fill(torch.eye(len(query), dtype=torch.bool), -math.inf)
    hardest = others.amax(1), others.amax(0)
    rows, columns = (F.relu(MARGIN + each - similarity.diagonal()).mean() for each in hardest)
    return (rows + columns) / 2


def plain_bidirectional(query: Tensor, key: Tensor) -> Tensor:
    """Hold the whole matrix; one cross entropy over its rows, one over its columns."""
    logits, own = query @ key.T / TEMPERATURE, torch.arange(len(query), device=query.device)
    return (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2


def open_clip_bidirectional(query: Tensor, key: Tensor) -> Tensor:
    """Scale the rows and take a product for each direction, as open_clip does."""
    own = torch.arange(len(query))
    of_queries, of_keys = query / TEMPERATURE @ key.T, key / TEMPERATURE @ query.T
    return (F.cross_entropy(of_queries, own) + F.cross_entropy(of_keys, own)) / 2


def plain_queue(query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
    """Hold all logits, the own key's first, as MoCo's own code does; one cross entropy."""
    own = (query * key).sum(1, keepdim=True)
    logits = torch.cat([own, query @ negatives.T], dim=1) / QUEUE_TEMPERATURE
    return F.cross_entropy(logits, torch.zeros(len(query), dtype=torch.int64))


def raycl_queue(query: Tensor, key: Tensor, negatives: Tensor) -> Tensor:
    return info_nce(query, key, temperature=QUEUE_TEMPERATURE, in_batch=False, negatives=negatives)


def lightly_loss(negatives: Tensor | None = None) -> Loss:
    from lightly.loss import NTXentLoss

    if negatives is None:
        return NTXentLoss(temperature=TEMPERATURE)
    theirs = NTXentLoss(temperature=QUEUE_TEMPERATURE, memory_bank_size=tuple(negatives.shape))
    theirs.memory_bank.bank = negatives.clone()
    return lambda query, key, negatives: theirs(query, key)


# For each side: what makes its loss from the negatives, and how many matrices of [2 * batch, 2 * batch] float32 it
# holds at its peak, as measured at batch 4,096.
SIDES: dict[str, dict[str, tuple[Callable[[Tensor | None], Loss], float]]] = {
    "nt_xent": {
        "raycl": (lambda _: partial(nt_xent, temperature=TEMPERATURE), 0.0),
        "lightly": (lightly_loss, 4.2),
        "plain": (lambda _: plain_nt_xent, 3.3),
    },
    "hinge": {
        "raycl": (lambda _: partial(hinge, margin=MARGIN, hardest=True), 0.0),
        "plain": (lambda _: plain_hinge, 1.4),
    },
    "bidirectional": {
        "raycl": (lambda _: partial(clip, temperature=TEMPERATURE), 0.0),
        "open_clip": (lambda _: open_clip_bidirectional, 1.0),
        "plain": (lambda _: plain_bidirectional, 1.0),
    },
    "queue": {
        "raycl": (lambda _: raycl_queue, 0.0),
        "lightly": (lightly_loss, 0.0),
        "plain": (lambda _: plain_queue, 0.0),
    },
}


def build_step(loss: str, side: str, size: int, dim: int, num_negatives: int) -> Callable[[], float]:
    """Return what takes value and gradients once, of unit rows; beside a queue only queries have a gradient."""
    torch.manual_seed(0)
    query, key = (each.clone() for each in F.normalize(torch.randn(2, size, dim), dim=2))
    rows = [query.requires_grad_(), key.requires_grad_(loss != "queue")]
    if loss == "queue":
        rows.append(F.normalize(torch.randn(num_negatives, dim), dim=1))
    function = SIDES[loss][side][0](*rows[2:] or [None])

    def step() -> float:
        query.grad = key.grad = None
        value = function(*rows)
        value.backward()
        return value.item()

    return step


def memory_mb(loss: str, side: str, *sizes: int) -> float:
    """Return the peak memory of one step; libraries and their buffers are there before."""
    build_step(loss, side, 64, 64, 64)()
    return cost(build_step(loss, side, *sizes))["memory_mb"]


def compare(loss: str, size: int, dim: int, options: argparse.Namespace) -> list[Line]:
    """Return a line for each side at one size."""
    sizes = size, dim, options.num_negatives
    needed_gb = {side: held * (2 * size) ** 2 * 4 / 1e9 for side, (_, held) in SIDES[loss].items()}
    steps = {
        side: build_step(loss, side, *sizes) for side, gb in needed_gb.items() if gb <= options.memory_gb
    }
    values = {side: f"{step():.5f}" for side, step in steps.items()}
    lines: Sequence[Line] = alternate({side: timed(step) for side, step in steps.items()}, options.repeats)
    for line in lines:
        side = line["side"]
        line |= {"memory_mb": apart(memory_mb, loss, side, *sizes, num_threads=1), "value": values[side]}
    add_times(lines, lines[0], "cpu_ms", "memory_mb")
    skipped = [
        {"side": side, "skipped": f"needs about {gb:.0f} GB"}
        for side, gb in needed_gb.items()
        if side not in steps
    ]
    return [{"size": size, "dim": dim} | line for line in [*lines, *skipped]]


def main() -> None:
    parser = make_parser(__doc__, loss=tuple(SIDES), num_negatives=65_536, memory_gb=8.0, quick=False)
    for name in ("sizes", "dims"):
        parser.add_argument(f"--{name}", type=int, nargs="+")
    parser.add_argument("--repeats", type=int)
    options = parser.parse_args()
    is_queue = options.loss == "queue"
    if options.quick:
        options.sizes, options.dims, options.repeats = [256 if is_queue else 1_024], [128], 3
        options.num_negatives = 8_192
    options.sizes = options.sizes or ([256] if is_queue else [1_024, 4_096, 16_384])
    options.dims = options.dims or ([128] if is_queue else [128, 512])
    options.repeats = options.repeats or (9 if is_queue else 5)
    torch.set_num_threads(1)
    lines = [
        line
        for size in options.sizes
        for dim in options.dims
        for line in compare(options.loss, size, dim, options)
    ]
    titles = {"cpu_ms": "CPU ms", "cpu_ms_times": "times", "wall_ms": "wall ms", "memory_mb": "MB"}
    titles |= {"memory_mb_times": "times", "value": "value", "skipped": "skipped"}
    report(options, lines, table(lines, size="rows", dim="dim", side=options.loss, **titles))


if __name__ == "__main__":
    main()
