"""What a network takes for each row of a step, measured: forward and backward of few rows, as a run has them."""

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from raycl.batchnorm import split_batchnorm
from raycl.config import RunConfig, Stage
from raycl.gradient_cache import embed_in_chunks
from raycl.models.towers import TwoTowers
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training import build
from raycl.training.process import autocast, available_cores

FEW = 4  # rows, and twice as many: the difference is what rows take, without what the network does


@final
@dataclass(frozen=True, kw_only=True)
class Measured:
    """Bytes that a worker needs, all measured in a process of Ray's.

    ``process`` is the process before there is a network. Of each side (the only tower, or that of queries and
    that of keys), ``row`` is what a row takes in a step, ``waiting`` what it takes of it while the chunks
    of others are embedded, and ``input`` the row itself.
    """

    process: float
    parameters: float
    buffers: float
    row: tuple[float, ...]
    waiting: tuple[float, ...]
    input: tuple[float, ...]


def measure(config: RunConfig, stage: Stage, tokenizer: Tokenizer | None) -> Measured:
    """Build the towers and embed a few rows, once with the graph of all and, with chunks, in chunks too."""
    process = resident_bytes()
    torch.set_num_threads(available_cores())
    samples = build.modality(config, _vocabulary(config, tokenizer))
    towers = build.towers(config, samples)
    towers.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if config.batchnorm == "shuffled":
        split_batchnorm(towers, 2)  # what is normalized together changes no size
    num_tokens = config.text.vocabulary_size if tokenizer is None else tokenizer.num_tokens
    inputs = _inputs(config, num_tokens)
    sides = [towers.query, towers.key_tower] if isinstance(towers, TwoTowers) else [towers]
    parts = [_measure_side(config, stage, *side) for side in zip(sides, inputs, strict=True)]
    return Measured(
        process=process,
        parameters=sum(each.nbytes for each in towers.parameters()),
        buffers=sum(each.nbytes for each in towers.buffers()),
        row=tuple(row for row, _ in parts),
        waiting=tuple(waiting for _, waiting in parts),
        input=tuple(rows(1).nbytes for rows in inputs),
    )


def resident_bytes() -> float:
    """Return the memory of this process that is no one else's, in bytes; 0 where the system does not tell."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0.0
    return 1024.0 * sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("RssAnon"))


def peak_bytes(call: Callable[[], object]) -> float:
    """Return the most memory that torch holds during a call beyond what it held before, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events: list[Any] = json.loads(path.read_text())["traceEvents"]
    moves = sorted(
        (event["ts"], event["args"]["Bytes"]) for event in events if event.get("name") == "[memory]"
    )
    held = most = 0
    for _, num_bytes in moves:
        held += num_bytes
        most = max(most, held)
    return float(most)


def _measure_side(
    config: RunConfig, stage: Stage, tower: nn.Module, rows: Callable[[int], Tensor]
) -> tuple[float, float]:
    """Return what a row takes with its graph, and of it what it takes while it waits for other chunks."""

    def peak(num_rows: int, chunk_size: int | None = None) -> float:
        batch = rows(num_rows)

        def step() -> None:
            with autocast(config.tower_precision, torch.device("cpu")):
                embeddings = (
                    tower(batch)
                    if chunk_size is None
                    else embed_in_chunks(
                        tower, batch, chunk_size=chunk_size, milestone_every=stage.milestone_every
                    )
                )
            embeddings.square().sum().backward()

        step()  # gradients are there from now on
        return peak_bytes(step)

    row = _slope(peak(FEW), peak(2 * FEW), FEW)
    if stage.chunk_size is None:
        return row, 0.0
    return row, _slope(peak(2 * FEW, 2), peak(4 * FEW, 2), 2 * FEW)


def _slope(few: float, many: float, difference: int) -> float:
    return max(0.0, (many - few) / difference)


def _inputs(config: RunConfig, num_tokens: int) -> list[Callable[[int], Tensor]]:
    """Return what makes so many rows of each side: images, or the longest texts there may be."""
    data, text = config.data, config.text

    def images(count: int) -> Tensor:
        return torch.randn(count, data.channels, data.image_size, data.image_size)

    def tokens(length: int) -> Callable[[int], Tensor]:
        return lambda count: torch.randint(5, num_tokens, (count, length))

    document = tokens(text.max_document_length or text.max_length)
    sides: dict[str, Sequence[Callable[[int], Tensor]]] = {
        "image": [images],
        "text": [tokens(text.max_length)],
        "image_text": [images, tokens(text.max_length)],
        "pairs": [tokens(text.max_length), document],
    }
    return list(sides[config.data.kind])


def _vocabulary(config: RunConfig, tokenizer: Tokenizer | None) -> Vocabulary | None:
    """Return the run's vocabulary, or one of the size that a run would train at most."""
    if not config.has_texts:
        return None
    if tokenizer is not None:
        return Vocabulary(tokenizer)
    small = json.loads(Vocabulary.stand_in().tokenizer.to_json())
    known = small["model"]["vocab"]
    for number in range(len(known), config.text.vocabulary_size):
        known[f"unseen{number}"] = number
    return Vocabulary(Tokenizer.from_json(json.dumps(small)))
