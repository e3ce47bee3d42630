"""A step's gradient in chunks: raycl beside the whole batch, GradCache and sentence-transformers.

    python benchmarks/accumulate.py [--json FILE] [--networks resnet transformer] [--quick]

Every run is a process of its own, with one thread: it embeds 1,024 queries and 1,024 keys, compares
them (InfoNCE, one direction) and takes the gradient of all parameters, twice; the sides take turns.
Time is the process's CPU time of the second step, which has its memory already; memory is the peak
above the process's memory before, embeddings and gradients included. ``whole`` has the graph of the whole batch and
raycl's loss; ``raycl-0``, ``raycl-1`` and ``raycl-4`` keep so many of the 16 chunks' graphs from the
first pass. All have raycl's allocator settings, without which the peers would pay for page faults.

The ResNet has GroupNorm, the only kind that all sides can do; the transformer has four layers and
dropout. ``lockstep``, ``lockstep-milestones`` and ``whole-batchnorm`` are the ResNet with BatchNorm over
the whole batch: the cost of exactness there. The error compares the gradient in float32 with the whole batch's
in float64 (with dropout, whose masks fall otherwise in chunks, there is none to give).
``gradcache-batchnorm`` shows what GradCache makes of BatchNorm.
"""

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import describe_machine, make_parser, read_status, run_apart, summarize, write_json
from result_tables import BATCHNORM_SIDES
from torch import Tensor, nn

from raycl.batchnorm import replace_batchnorm
from raycl.gradient_cache import embed_in_chunks
from raycl.losses import info_nce
from raycl.models.image import build_image_encoder
from raycl.models.towers import Tower, build_projection_head
from raycl.training.process import prepare_process

TEMPERATURE = 0.1
SIDES = ("whole", "raycl-0", "raycl-1", "raycl-4", "gradcache", "sentence-transformers")
EXACT_SIDES = {"exact": "whole", "exact-batchnorm": "whole-batchnorm"}  # in float64, for the errors


class Transformer(nn.Module):
    """Four layers of 256 dimensions with dropout, over 32 tokens; the mean of the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8_192, 256)
        layer = nn.TransformerEncoderLayer(256, 4, 1_024, dropout=0.1, batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.normalize(self.layers(self.embedding(tokens)).mean(1), dim=1)


class DoubleTower(nn.Module):
    """A tower in float64 to the end; its own rows are float32."""

    def __init__(self, tower: Any) -> None:
        super().__init__()
        self.tower = tower.double()

    def forward(self, images: Tensor) -> Tensor:
        return F.normalize(self.tower.projection_head(self.tower.encoder(images)), dim=1)


def build_network(name: str, *, batchnorm: bool) -> nn.Module:
    torch.manual_seed(0)
    if name == "transformer":
        return Transformer()
    encoder = build_image_encoder("resnet10", image_size=32, stem="small", width=0.5)
    tower = Tower(encoder, build_projection_head(256, num_layers=2, hidden_dim=None, dim=128))
    tower = tower.to(memory_format=torch.channels_last)
    return tower if batchnorm else replace_batchnorm(tower, "group")


def make_rows(name: str, num_rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    if name == "transformer":
        query, key = torch.randint(8_192, (2, num_rows, 32), generator=generator)
        return query, key
    query, key = torch.rand(2, num_rows, 3, 32, 32, generator=generator)
    return query.to(memory_format=torch.channels_last), key.to(memory_format=torch.channels_last)


Step = Callable[[nn.Module, Tensor, Tensor, int], float]


def step_whole(network: nn.Module, query: Tensor, key: Tensor, _: int) -> float:
    loss = info_nce(*network(torch.cat([query, key])).chunk(2), temperature=TEMPERATURE)
    loss.backward()
    return loss.item()


def step_raycl(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int, **settings: Any) -> float:
    embedding = embed_in_chunks(network, torch.cat([query, key]), chunk_size=chunk_size, **settings)
    loss = info_nce(*embedding.chunk(2), temperature=TEMPERATURE)
    loss.backward()
    return loss.item()


def step_gradcache(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int) -> float:
    import gradcache.context_managers

    # Its files still import one another by the name that the package had before it was published.
    sys.modules["grad_cache"] = gradcache
    sys.modules["grad_cache.context_managers"] = gradcache.context_managers
    from gradcache.grad_cache import GradCache

    def contrast(queries: Tensor, keys: Tensor) -> Tensor:
        return F.cross_entropy(queries @ keys.T / TEMPERATURE, torch.arange(len(queries)))

    cache = GradCache(models=[network, network], chunk_sizes=chunk_size, loss_fn=contrast)
    return cache(query, key).item()


def step_sentence_transformers(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int) -> float:
    import sentence_transformers.losses
    from sentence_transformers import SentenceTransformer

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return features | {"sentence_embedding": self.network(features["input_ids"])}

    model = SentenceTransformer(modules=[Module()], device="cpu")
    cached = sentence_transformers.losses.CachedMultipleNegativesRankingLoss(
        model, scale=1 / TEMPERATURE, mini_batch_size=chunk_size
    )
    loss = cached([{"input_ids": query}, {"input_ids": key}], torch.empty(0))
    loss.backward()
    return loss.item()


STEPS: dict[str, Step] = {
    "whole": step_whole,
    "exact": step_whole,
    "exact-batchnorm": step_whole,
    **{f"raycl-{kept}": partial(step_raycl, cached_chunks=kept) for kept in (0, 1, 2, 4)},
    "gradcache": step_gradcache,
    "sentence-transformers": step_sentence_transformers,
    "whole-batchnorm": step_whole,
    "lockstep": step_raycl,
    "lockstep-milestones": partial(step_raycl, activation_checkpoint_every=1),
    "gradcache-batchnorm": step_gradcache,
}


def run_side(arguments: argparse.Namespace) -> None:
    """Take one step and print its cost; runs in a process of its own."""
    prepare_process(1)
    network = build_network(
        arguments.network, batchnorm=arguments.side in (*BATCHNORM_SIDES, "exact-batchnorm")
    )
    step = STEPS[arguments.side]
    step(copy.deepcopy(network), *make_rows(arguments.network, 4), 2)  # libraries and their buffers
    query, key = make_rows(arguments.network, arguments.batch_size)
    if arguments.side in EXACT_SIDES:
        network, query, key = DoubleTower(network), query.double(), key.double()
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
    before = read_status("VmRSS")
    step(copy.deepcopy(network), query, key, arguments.chunk_size)  # as training: the memory is there by then
    torch.manual_seed(0)
    cpu, wall = time.process_time(), time.perf_counter()
    value = step(network, query, key, arguments.chunk_size)
    cost = {
        "cpu_s": time.process_time() - cpu,
        "wall_s": time.perf_counter() - wall,
        "memory_mb": read_status("VmHWM") - before,
        "value": value,
    }
    gradient = [parameter.grad.flatten() for parameter in network.parameters() if parameter.grad is not None]
    torch.save(torch.cat(gradient), arguments.gradient)
    print(json.dumps(cost))


def measure(network: str, sides: list[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Run all sides in turn, several times; return a line for each."""
    costs: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            for side in sides:
                costs[side].append(_run_apart(network, side, Path(folder) / side, arguments))
                print(".", end="", file=sys.stderr, flush=True)
        gradients = {side: torch.load(Path(folder) / side).double() for side in sides}
        for exact in {_reference(side) for side in sides} if network == "resnet" else ():
            _run_apart(network, exact, Path(folder) / exact, arguments)
            gradients[exact] = torch.load(Path(folder) / exact)
    print(file=sys.stderr)
    return [
        {
            "network": network,
            "side": side,
            "cpu_s": summarize([each["cpu_s"] for each in costs[side]]),
            "wall_s": summarize([each["wall_s"] for each in costs[side]]),
            "memory_mb": statistics.median(each["memory_mb"] for each in costs[side]),
            "value": costs[side][0]["value"],
            "error": _error(gradients[side], gradients.get(_reference(side))),
        }
        for side in sides
    ]


def _run_apart(network: str, side: str, gradient: Path, arguments: argparse.Namespace) -> dict[str, float]:
    sizes = "--batch-size", arguments.batch_size, "--chunk-size", arguments.chunk_size
    words = "--side", side, "--network", network, "--gradient", gradient, *sizes
    return run_apart(__file__, *words, num_threads=1, MALLOC_ARENA_MAX="1")


def _reference(side: str) -> str:
    return "exact-batchnorm" if side in BATCHNORM_SIDES else "exact"


def _error(gradient: Tensor, exact: Tensor | None) -> float | None:
    return None if exact is None else float((gradient - exact).norm() / exact.norm())


def print_lines(lines: list[dict[str, Any]]) -> None:
    by_side = {line["side"]: line for line in lines}
    for line in lines:
        reference = by_side[EXACT_SIDES[_reference(line["side"])]]
        error = "" if line["error"] is None else f"{line['error']:.1e}"
        slower = line["cpu_s"]["median"] / reference["cpu_s"]["median"]
        share = line["memory_mb"] / reference["memory_mb"]
        print(
            f"{line['network']:<12} {line['side']:<22} {line['cpu_s']['median']:>7.2f} "
            f"({line['cpu_s']['min']:.2f}-{line['cpu_s']['max']:.2f}) {slower:>6.2f}x "
            f"{line['memory_mb']:>8.0f} {share:>6.2f}x  {error:>8}  {line['value']:.5f}",
            flush=True,
        )


def parse_arguments() -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--networks", nargs="+", default=["resnet", "transformer"])
    parser.add_argument("--sides", nargs="+", help="only these")
    parser.add_argument("--batch-size", type=int, default=1_024)
    parser.add_argument("--chunk-size", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="batch 128 in chunks of 16, one repeat")
    for hidden in ("--side", "--network", "--gradient"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure, print the table, write the JSON."""
    arguments = parse_arguments()
    if arguments.side:
        run_side(arguments)
        return
    if arguments.quick:
        arguments.batch_size, arguments.chunk_size, arguments.repeats = 128, 16, 1
    print("network      side                     CPU s (least-most)   time       MB   memory  error  value")
    lines: list[dict[str, Any]] = []
    for network in arguments.networks:
        sides = arguments.sides or [*SIDES, *(BATCHNORM_SIDES if network == "resnet" else ())]
        measured = measure(network, sides, arguments)
        print_lines(measured)
        lines += measured
    write_json(arguments.json, {"machine": describe_machine(), "lines": lines})


if __name__ == "__main__":
    main()
