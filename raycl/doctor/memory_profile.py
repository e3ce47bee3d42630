"""The memory of a recipe's network, measured: forward and backward passes of few rows, as a run makes them."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from raycl.batchnorm import split_batchnorm
from raycl.config import RunConfig, Stage
from raycl.distributed.device_copy import use_channels_last
from raycl.doctor.nodes import process_memory
from raycl.gpus import available_cores
from raycl.gradient_cache import checkpoint_activations, embed_in_chunks
from raycl.models.blocks import residual_blocks
from raycl.models.build import build_prediction_head, build_towers
from raycl.models.towers import Tower, TwoTowers
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.pools import pools_of
from raycl.training.process import autocast

# Measured along with twice as many: the difference excludes costs that do not grow with the rows.
FEW_ROWS = 4
_MOST_ROWS = 256  # that are encoded to measure a row without a graph
_GROWTH = 1.7  # of the peak with twice the rows: then rows, and not the weights of a layer, are most of it


@final
@dataclass(frozen=True, kw_only=True)
class MemoryProfile:
    """Measured bytes of a worker: its process without a network, and the network's parameters and buffers.

    The tuples have one entry per side (query and key towers) or, for a single tower, per size of its views: the activations of a row, its
    part that stays while the chunks of other rows are embedded, and the row's own input. A prediction head, if any, has
    the bytes ``prediction_head``, and each row in it ``predictions``. ``encoded`` has the bytes of a row that is only encoded, if
    the run has a pool of encoders.
    """

    process: float
    parameters: float
    buffers: float
    activations: tuple[float, ...]
    waiting: tuple[float, ...]
    inputs: tuple[float, ...]
    prediction_head: float = 0.0
    predictions: float = 0.0
    encoded: tuple[float, ...] = ()

    @property
    def learned(self) -> float:
        """The parameters of all networks."""
        return self.parameters + self.prediction_head


def profile_memory(config: RunConfig, stage: Stage, tokenizer: Tokenizer | None) -> MemoryProfile:
    """Build the towers and measure a step of few rows, with the graph of all and, if set, in chunks."""
    process = process_memory()
    torch.set_num_threads(available_cores())
    towers = build_towers(config, _vocabulary(config, tokenizer))
    use_channels_last(towers)
    head = build_prediction_head(config)
    if config.batchnorm == "shuffled":
        for network in filter(None, (towers, head)):
            split_batchnorm(network, 2)  # the groups have no influence on the sizes
    num_tokens = config.text.vocabulary_size if tokenizer is None else tokenizer.num_tokens
    make_inputs = [partial(_make_rows, shape, num_tokens) for shape in _row_shapes(config, stage)]
    is_pair = isinstance(towers, TwoTowers)
    sides = [towers.query, towers.key_tower] if is_pair else [towers] * len(make_inputs)
    measured = [_profile_tower(config, stage, *side) for side in zip(sides, make_inputs, strict=True)]
    encoding = zip(sides, make_inputs, strict=True) if pools_of(config) else ()
    return MemoryProfile(
        process=process,
        parameters=sum(each.nbytes for each in towers.parameters()),
        buffers=sum(each.nbytes for each in towers.buffers()),
        activations=tuple(activations for activations, _ in measured),
        waiting=tuple(waiting for _, waiting in measured),
        inputs=tuple(make(1).nbytes for make in make_inputs),
        prediction_head=0.0 if head is None else sum(each.nbytes for each in head.parameters()),
        predictions=0.0 if head is None else _activations_of_head(config, head),
        encoded=tuple(_bytes_to_encode(config, *side) for side in encoding),
    )


def _profile_tower(
    config: RunConfig, stage: Stage, tower: Tower, make_inputs: Callable[[int], Tensor]
) -> tuple[float, float]:
    """Return the bytes of a row with its graph, and while it waits for other chunks."""
    every, blocks = stage.activation_checkpoint_every, residual_blocks(tower.encoder)
    checkpoint_activations(tower, blocks, every=every, chunk_size=stage.chunk_size)

    def peak(num_rows: int, chunk_size: int | None = None) -> float:
        embed: Callable[[Tensor], Tensor] = tower
        if chunk_size is not None:
            embed = partial(embed_in_chunks, tower, chunk_size=chunk_size, activation_checkpoint_every=every)
        return _peak_of_step(config, embed, make_inputs(num_rows))

    activations = max(0.0, peak(2 * FEW_ROWS) - peak(FEW_ROWS)) / FEW_ROWS
    if stage.chunk_size is None:
        return activations, 0.0
    waiting = max(0.0, peak(4 * FEW_ROWS, 2) - peak(2 * FEW_ROWS, 2)) / (2 * FEW_ROWS)
    return activations, waiting


@torch.no_grad()
def _bytes_to_encode(config: RunConfig, tower: Tower, make_inputs: Callable[[int], Tensor]) -> float:
    """Return an upper estimate of the bytes of a row in a forward pass without a graph."""

    def peak(num_rows: int) -> float:
        rows = make_inputs(num_rows)
        with autocast(config.tower_precision, rows.device):
            return peak_bytes(lambda: tower(rows))

    num_rows, before, found = FEW_ROWS, peak(FEW_ROWS), peak(2 * FEW_ROWS)
    while found < _GROWTH * before and 2 * num_rows < _MOST_ROWS:
        num_rows, before, found = 2 * num_rows, found, peak(4 * num_rows)
    return found / (2 * num_rows)


def _activations_of_head(config: RunConfig, head: Tower) -> float:
    """Return the bytes of a row in the prediction head with its graph."""
    few, more = (
        _peak_of_step(config, head, torch.randn(count, config.projection_head.dim, requires_grad=True))
        for count in (FEW_ROWS, 2 * FEW_ROWS)
    )
    return max(0.0, more - few) / FEW_ROWS


def _peak_of_step(config: RunConfig, embed: Callable[[Tensor], Tensor], inputs: Tensor) -> float:
    """Return the peak of a forward and backward pass, whose gradients are allocated before."""

    def step() -> None:
        with autocast(config.tower_precision, torch.device("cpu")):
            embeddings = embed(inputs)
        embeddings.square().sum().backward()

    step()  # allocates the gradients
    return peak_bytes(step)


def peak_bytes(call: Callable[[], object]) -> float:
    """Return the most memory that torch allocates during a call, in bytes."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        call()
    results: Any = recorded.profiler
    changes = [event for event in results.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for change in sorted(changes, key=lambda event: event.start_ns()):
        held += change.nbytes()
        peak = max(peak, held)
    return float(peak)


def _row_shapes(config: RunConfig, stage: Stage) -> list[tuple[int, ...]]:
    """Return the shape of a row for each side: an image of each size, or a text of the greatest length."""
    data, text = config.data, config.text
    images = [(data.channels, size, size) for size in config.views_by_size(stage)]
    query, document = (text.max_length,), (text.max_document_length or text.max_length,)
    sides = {"image": images, "text": [query], "image_text": [*images, query], "pairs": [query, document]}
    return sides[data.kind]


def _make_rows(shape: tuple[int, ...], num_tokens: int, count: int) -> Tensor:
    if len(shape) == 1:
        return torch.randint(5, num_tokens, (count, *shape))
    return torch.randn(count, *shape)


def _vocabulary(config: RunConfig, tokenizer: Tokenizer | None) -> Vocabulary | None:
    """Return the run's vocabulary, or one of the greatest size that a run would train."""
    if not config.has_texts:
        return None
    if tokenizer is not None:
        return Vocabulary(tokenizer)
    stand_in = json.loads(Vocabulary.stand_in().tokenizer.to_json())
    tokens = stand_in["model"]["vocab"]
    for number in range(len(tokens), config.text.vocabulary_size):
        tokens[f"unseen{number}"] = number
    return Vocabulary(Tokenizer(json.dumps(stand_in)))
