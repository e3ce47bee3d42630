"""A step's gradient in chunks: raycl beside the whole batch, GradCache and sentence-transformers.

    python benchmarks/accumulate.py [--networks resnet transformer] [--sides ...] [--quick] [--json FILE]

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
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from measuring import Line, alternate, apart, cost, make_parser, markdown_table, middle, report, write_figure
from torch import Tensor, nn

from raycl.batchnorm import replace_batchnorm
from raycl.gradient_cache import embed_in_chunks
from raycl.losses import info_nce
from raycl.models.image import build_image_encoder
from raycl.models.towers import Tower, build_projection_head
from raycl.training.process import prepare_process

TEMPERATURE = 0.1


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


def whole(network: nn.Module, query: Tensor, key: Tensor, _: int) -> float:
    loss = info_nce(*network(torch.cat([query, key])).chunk(2), temperature=TEMPERATURE)
    loss.backward()
    return loss.item()


def raycl(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int, **settings: Any) -> float:
    embedding = embed_in_chunks(network, torch.cat([query, key]), chunk_size=chunk_size, **settings)
    loss = info_nce(*embedding.chunk(2), temperature=TEMPERATURE)
    loss.backward()
    return loss.item()


def gradcache(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int) -> float:
    import gradcache.context_managers

    # Its files still import one another by the name that the package had before it was published.
    sys.modules["grad_cache"] = gradcache
    sys.modules["grad_cache.context_managers"] = gradcache.context_managers
    from gradcache.grad_cache import GradCache

    def contrast(queries: Tensor, keys: Tensor) -> Tensor:
        return F.cross_entropy(queries @ keys.T / TEMPERATURE, torch.arange(len(queries)))

    cache = GradCache(models=[network, network], chunk_sizes=chunk_size, loss_fn=contrast)
    return cache(query, key).item()


def sentence_transformers(network: nn.Module, query: Tensor, key: Tensor, chunk_size: int) -> float:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.losses import CachedMultipleNegativesRankingLoss

    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.network = network

        def forward(self, features: dict[str, Any]) -> dict[str, Any]:
            return features | {"sentence_embedding": self.network(features["input_ids"])}

    model = SentenceTransformer(modules=[Module()], device="cpu")
    cached = CachedMultipleNegativesRankingLoss(model, scale=1 / TEMPERATURE, mini_batch_size=chunk_size)
    loss = cached([{"input_ids": query}, {"input_ids": key}], torch.empty(0))
    loss.backward()
    return loss.item()


SIDES: dict[str, tuple[str, Callable[..., float]]] = {
    "whole": ("whole batch", whole),
    "raycl-0": ("raycl, no graph kept", partial(raycl, cached_chunks=0)),
    "raycl-1": ("raycl, 1 kept (the default)", partial(raycl, cached_chunks=1)),
    "raycl-4": ("raycl, 4 kept", partial(raycl, cached_chunks=4)),
    "gradcache": ("GradCache", gradcache),
    "sentence-transformers": ("sentence-transformers' cached loss", sentence_transformers),
}
BATCHNORM_SIDES: dict[str, tuple[str, Callable[..., float]]] = {
    "whole-batchnorm": ("whole batch with BatchNorm", whole),
    "lockstep": ("raycl, BatchNorm over the whole batch", raycl),
    "lockstep-milestones": (
        "... `activation_checkpoint_every=1`",
        partial(raycl, activation_checkpoint_every=1),
    ),
    "gradcache-batchnorm": ("GradCache, BatchNorm per chunk", gradcache),
}
EXACT = ("exact", "exact-batchnorm")  # the whole batch in float64, for the errors


def run_side(network: str, side: str, batch_size: int, chunk_size: int, gradient: str) -> dict[str, float]:
    """Take a step, save its gradient and return its cost; in a process of its own."""
    prepare_process(1)
    is_exact = side in EXACT
    step = whole if is_exact else (SIDES | BATCHNORM_SIDES)[side][1]
    tower = build_network(network, batchnorm=side in (*BATCHNORM_SIDES, EXACT[1]))
    step(copy.deepcopy(tower), *make_rows(network, 4), 2)  # libraries and their buffers
    query, key = make_rows(network, batch_size)
    if is_exact:
        tower, query, key = DoubleTower(tower), query.double(), key.double()
    first = cost(lambda: step(copy.deepcopy(tower), query, key, chunk_size))
    torch.manual_seed(0)
    values: list[float] = []
    second = cost(lambda: values.append(step(tower, query, key, chunk_size)))  # its memory is there already
    found = second | {"memory_mb": max(first["memory_mb"], second["memory_mb"]), "value": values[0]}
    gradients = [parameter.grad.flatten() for parameter in tower.parameters() if parameter.grad is not None]
    torch.save(torch.cat(gradients), gradient)
    return found


def compare(network: str, sides: Sequence[str], options: argparse.Namespace) -> list[Line]:
    """Run all sides in turn; return a line for each, with the error of its gradient."""
    sizes = options.batch_size, options.chunk_size
    with tempfile.TemporaryDirectory() as folder:

        def run(side: str) -> Any:
            words = network, side, *sizes, f"{folder}/{side}"
            return apart(run_side, *words, num_threads=1, environment={"MALLOC_ARENA_MAX": "1"})

        def gradient_of(side: str) -> Tensor:
            return torch.load(Path(folder) / side).double()

        lines = alternate({side: partial(run, side) for side in sides}, options.repeats)
        for line in lines:
            exact = EXACT[line["side"] in BATCHNORM_SIDES]
            if network == "resnet" and not (Path(folder) / exact).exists():
                run(exact)
            off = gradient_of(line["side"]) - gradient_of(exact) if network == "resnet" else None
            line |= {"error": None if off is None else float(off.norm() / gradient_of(exact).norm())}
    return [{"network": network} | line for line in lines]


def table(lines: Sequence[Line]) -> str:
    """Return time, memory and error of every side, beside the whole batch of the same network."""
    rows, by_side = [], {(line["network"], line["side"]): line for line in lines}
    for line in lines:
        reference = by_side[line["network"], "whole" + "-batchnorm" * (line["side"] in BATCHNORM_SIDES)]
        cells = [line["network"], (SIDES | BATCHNORM_SIDES)[line["side"]][0]]
        for key in ("cpu_s", "memory_mb"):
            of_whole = middle(line[key]) / middle(reference[key])
            cells += [write_figure(line[key]), f"{of_whole:.2f}"]
        rows.append([*cells, "-" if line["error"] is None else f"{line['error']:.1e}"])
    columns = ["network", "side", "CPU s", "of the whole", "MB", "of the whole"]
    return markdown_table([*columns, "gradient error against float64"], rows)


def main() -> None:
    flags: dict[str, Any] = {"networks": ["resnet", "transformer"], "sides": [*SIDES, *BATCHNORM_SIDES]}
    parser = make_parser(__doc__, **flags, batch_size=1_024, chunk_size=128, repeats=3, quick=False)
    options = parser.parse_args()
    if options.quick:
        options.batch_size, options.chunk_size, options.repeats = 128, 16, 1
    lines = []
    for network in options.networks:
        possible = SIDES if network == "transformer" else SIDES | BATCHNORM_SIDES
        lines += compare(network, [side for side in options.sides if side in possible], options)
    report(options, lines, table(lines))


if __name__ == "__main__":
    main()
