"""One exact step of a million pairs: the losses clip and siglip over workers in a ring, against float64.

    python benchmarks/million_pairs.py [--pairs 1048576] [--workers 4] [--losses clip siglip] [--samples 64] [--json FILE]

Each worker is a process with its share of the pairs: unit rows of 128 numbers, and keys that are queries with noise.
The loss is called as in a training step, and rows pass around the ring; for fewer pairs the ring is forced. Time covers
the step, and memory the peak of the whole process until then. Afterwards each worker computes the loss, and
the gradient of some of its queries and keys in float64, in tiles over all pairs. Two parts are sums over all pairs:
the loss, and the logsumexps of all other rows in a gradient of clip. Above 262,144 pairs their terms are float32,
summed in float64; ``reference error`` is the largest difference of such a logsumexp from the one in float64, among the
sampled rows. The first worker prints the progress every minute. Time grows with the square of the number of pairs.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.nn.functional as F
from measuring import Line, in_workers, make_parser, read_status, repeating, report, table
from torch import Tensor

from raycl.distributed import all_sum, collectives, gather_detached, num_workers, rank
from raycl.gpus import available_cores
from raycl.losses import tiled
from raycl.losses.example_ids import ExampleIds
from raycl.losses.objective import StoreBatch, build_objective
from raycl.losses.tiled import LOG2_E, spans

DIM, NOISE = 128, 0.1
TEMPERATURES, BIAS = {"clip": 0.05, "siglip": 0.1}, -10.0
PRODUCTS = {"clip": 4, "siglip": 3}  # matrix products with all rows
ROWS, COLUMNS = 256, 1_024  # of a tile of the reference
EXACT_PAIRS = 2**18  # with more pairs, terms of the logsumexps and of the loss are computed in float32
Pair = tuple[Tensor, Tensor]


def make_pairs(worker: int, local: int) -> Pair:
    """Return the queries and keys of a worker, float32 [local, 128]."""
    generator = torch.Generator().manual_seed(worker)
    query = F.normalize(torch.randn(local, DIM, generator=generator), dim=1)
    return query, F.normalize(query + NOISE * torch.randn(local, DIM, generator=generator), dim=1)


def measure(worker: int, meeting: str, loss: str, options: dict[str, int]) -> Line:
    """Join the other workers, and compare a step with its reference."""
    workers = options["workers"]
    torch.set_num_threads(max(1, available_cores() // workers))
    timeout = timedelta(days=1)  # a worker may be hours ahead of another
    dist.init_process_group("gloo", init_method=meeting, rank=worker, world_size=workers, timeout=timeout)
    line = compare(loss, options["pairs"] // workers, options["samples"] // workers)
    dist.destroy_process_group()
    return line


def compare(loss: str, local: int, num_samples: int) -> Line:
    """Return time and memory of a step with ``local`` pairs a worker, and its errors at sampled rows."""
    line, value, gradients = take_step(loss, local)
    generator = torch.Generator().manual_seed(num_workers() + rank())
    samples = torch.randperm(local, generator=generator)[:num_samples]
    began = time.monotonic()
    reference, true_gradients = REFERENCES[loss](local, samples)
    line |= reference | {"reference_s": time.monotonic() - began}
    line["loss_error"] = abs(value - reference["value"]) / abs(reference["value"])
    for side, ours, true in zip(("query", "key"), gradients, true_gradients, strict=True):
        # Like DDP: a worker's loss is the mean over its own pairs, and a step averages over workers.
        errors = (ours[samples].double() / num_workers() - true).square().sum(1)
        squares = true.square().sum(1)
        of_errors, total = all_sum(torch.stack([errors.sum(), squares.sum()])).tolist()
        line[f"{side}_error"] = (of_errors / total) ** 0.5
        line[f"worst_{side}_error"] = (errors / squares).amax().sqrt().item()
    return line


def take_step(loss: str, local: int) -> tuple[Line, float, Pair]:
    """Return time and memory of a step, the loss of all pairs, and the gradients of this worker's rows."""
    query, key = (each.requires_grad_() for each in make_pairs(rank(), local))
    scalars = {"temperature": TEMPERATURES[loss], "bias": BIAS}
    learned = {name: torch.tensor(each, requires_grad=True) for name, each in scalars.items()}
    objective = build_objective(loss, hinge_weight=0.0, pairs=True, **learned)
    ids = rank() * local + torch.arange(local)
    began = time.monotonic()
    with patch.object(collectives, "MAX_GATHERED_BYTES", 0), printed_progress(loss, local):
        value = objective(query, key, StoreBatch(), ExampleIds(query=ids, key=ids.clone()))
        value.backward()
    line = {"wall_s": time.monotonic() - began, "peak_mb": read_status("VmHWM")}
    assert query.grad is not None, "queries have a gradient"
    assert key.grad is not None, "keys have a gradient"
    return line, all_sum(value.double()).item() / num_workers(), (query.grad, key.grad)


@contextmanager
def printed_progress(loss: str, local: int) -> Iterator[None]:
    """Print the matrix products of the first worker every minute."""
    done, began, original = [0], time.monotonic(), tiled.product

    def counted(left: Tensor, right: Tensor, *more: Any) -> Tensor:
        done[0] += len(left) * len(right) * left.shape[1]
        return original(left, right, *more)

    def say() -> None:
        rounds = done[0] / (local * local * num_workers() * DIM)
        print(
            f"{loss}: {rounds:.2f} of {PRODUCTS[loss]} products, {time.monotonic() - began:,.0f} s",
            flush=True,
        )

    with ExitStack() as stack:
        # Not by a path: the function siglip shadows its module.
        for room in ("softmax", "mutual", "ring", "siglip"):
            stack.enter_context(patch.object(sys.modules[f"raycl.losses.{room}"], "product", counted))
        if rank() == 0:
            stack.enter_context(repeating(say, every_s=60))
        yield


# The reference


def tiles(rows: Tensor, side: int, local: int) -> Iterator[tuple[slice, slice, Tensor, Tensor]]:
    """Yield slices of rows and of all columns, the columns, and their similarities; side 0 are queries."""
    for worker in range(num_workers()):
        columns = make_pairs(worker, local)[side]
        for span in spans(0, local, COLUMNS):
            part = columns[span].to(rows)
            everywhere = slice(worker * local + span.start, worker * local + span.stop)
            for block in spans(0, len(rows), ROWS):
                yield block, everywhere, part, rows[block] @ part.T


def precision_of_terms(num_pairs: int) -> torch.dtype:
    """Return the type of the terms of sums over all pairs."""
    return torch.float32 if num_pairs > EXACT_PAIRS else torch.float64


def clip_reference(local: int, samples: Tensor) -> tuple[Line, Pair]:
    """Compute the loss of CLIP: the logsumexp of each query over keys, and of each key over queries."""
    scale, num_pairs = LOG2_E / torch.tensor(TEMPERATURES["clip"]).item(), local * num_workers()
    sides = make_pairs(rank(), local)
    of_queries, of_keys = (torch.zeros(each, dtype=torch.float64) for each in (local, num_pairs))
    for block, columns, _, tile in tiles(sides[0].to(precision_of_terms(num_pairs)) * scale, 1, local):
        tile.sub_(scale).exp2_()  # the similarities are at most 1
        of_queries[block] += tile.sum(1)
        of_keys[columns] += tile.sum(0)
    logsumexp = [each.log2() + scale for each in (gather_detached(of_queries), all_sum(of_keys))]
    doubles = [each.double() for each in sides]
    positive = (doubles[0] * doubles[1]).sum(1) * scale
    value = (torch.stack(logsumexp).sum() / 2 - all_sum(positive.sum())) / (num_pairs * LOG2_E)
    errors, gradients, own = [], [], rank() * local + samples
    for side, rows in enumerate(each[samples] for each in doubles):
        sums = torch.zeros(len(samples), dtype=torch.float64)
        for block, _, _, tile in tiles(rows * scale, 1 - side, local):
            sums[block] += tile.sub_(scale).exp2_().sum(1)
        exact, gradient = sums.log2() + scale, -2 * doubles[1 - side][samples]
        errors.append((exact - logsumexp[side][own]).abs().amax() / LOG2_E)
        for block, columns, part, tile in tiles(rows * scale, 1 - side, local):
            of_rows = (tile - exact[block, None]).exp2_()
            gradient[block] += (of_rows + tile.sub_(logsumexp[1 - side][columns]).exp2_()) @ part
        gradients.append(gradient * scale / (2 * num_pairs * LOG2_E))
    line = {"value": value.item(), "reference_error": torch.stack(errors).amax().item()}
    return line, (gradients[0], gradients[1])


def siglip_reference(local: int, samples: Tensor) -> tuple[Line, Pair]:
    """Compute the loss of SigLIP over all combinations of queries and keys."""
    temperature, num_pairs = torch.tensor(TEMPERATURES["siglip"]).item(), local * num_workers()
    sides = make_pairs(rank(), local)
    doubles = [each.double() for each in sides]
    total = -((doubles[0] * doubles[1]).sum(1) / temperature + BIAS).sum()
    for _, _, _, tile in tiles(sides[0].to(precision_of_terms(num_pairs)) / temperature, 1, local):
        total += F.softplus(tile.add_(BIAS), threshold=40).sum()
    gradients = []
    for side, rows in enumerate(each[samples] for each in doubles):
        gradient = -doubles[1 - side][samples]
        for block, _, part, tile in tiles(rows / temperature, 1 - side, local):
            gradient[block] += tile.add_(BIAS).sigmoid_() @ part
        gradients.append(gradient / (num_pairs * temperature))
    return {"value": all_sum(total).item() / num_pairs}, (gradients[0], gradients[1])


REFERENCES: dict[str, Callable[[int, Tensor], tuple[Line, Pair]]] = {
    "clip": clip_reference,
    "siglip": siglip_reference,
}


def summarized(lines: list[Line]) -> Line:
    """Return the largest figure of all workers."""
    return {key: max(line[key] for line in lines) for key in lines[0]}


def read_options() -> argparse.Namespace:
    """Read the command line; refuse numbers that cannot be shared equally."""
    parser = make_parser(__doc__, pairs=2**20, workers=4, losses=list(REFERENCES), samples=64)
    options = parser.parse_args()
    for name in ("pairs", "samples"):
        if getattr(options, name) < options.workers or getattr(options, name) % options.workers:
            parser.exit(2, f"--{name} must be a multiple of the {options.workers} workers\n")
    return options


def main() -> None:
    options = read_options()
    numbers = {name: getattr(options, name) for name in ("pairs", "workers", "samples")}
    lines = []
    for loss in options.losses:
        with tempfile.TemporaryDirectory() as folder:
            meeting = Path(folder, "meeting").as_uri()
            found = in_workers(measure, options.workers, meeting, loss, numbers)
        lines.append({"side": loss} | numbers | summarized(found))
    titles = {
        "wall_s": "step s",
        "peak_mb": "MB of a worker",
        "value": "loss",
        "loss_error": "error of the loss",
    }
    for side in ("query", "key"):
        titles |= {f"{side}_error": f"error of {side} gradients", f"worst_{side}_error": "worst row"}
    titles |= {"reference_s": "reference s", "reference_error": "reference error"}
    report(options, lines, table(lines, side="", pairs="pairs", **titles))


if __name__ == "__main__":
    main()
