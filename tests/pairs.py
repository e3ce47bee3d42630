"""Synthetic texts and pairs as in a run: tokenized, stored, and read back as rows."""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from torch import nn

from raycl.config import RunConfig
from raycl.data.codecs import store_all
from raycl.data.in_memory import InMemoryDataset
from raycl.recipes import recipe
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.preflight import column_names
from raycl.training.transforms import build_formats
from tests.images import digit_files, encode
from tests.settings import override_active
from tests.texts import invented_texts

BAG = {"dim": 16, "hidden_dim": 24, "dropout": 0.0}
TRANSFORMER = {"dim": 16, "num_layers": 2, "num_heads": 2, "hidden_dim": 24, "dropout": 0.0}
_SMALL = {
    "text.max_length": 10,
    "text.max_document_length": 14,
    "projection_head.dim": 16,
    "bank.location": "worker",
    "optimizer.name": "sgd",
}
_OF_RECIPES: dict[str, dict[str, Any]] = {
    "two_tower": {"encoder.kwargs": BAG},
    "simcse": {"encoder.kwargs": TRANSFORMER},
    "esimcse": {"encoder.kwargs": TRANSFORMER},
    "clip": {"data.channels": 1, "encoder.name": "tests.pairs:small_network", "text_encoder.kwargs": BAG},
}
_NUM_DOCUMENTS = 40  # few, so that each batch contains duplicates


def small_config(name: str = "two_tower", settings: Mapping[str, Any] | None = None) -> RunConfig:
    """Return a recipe with tiny encoders and no dropout."""
    return override_active(recipe(name, image_size=8), {**_SMALL, **_OF_RECIPES[name]}, settings)


def small_network() -> nn.Module:
    """Return an encoder for grayscale images."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
    )


@functools.cache
def vocabulary() -> Vocabulary:
    """Return the vocabulary of synthetic texts, the same in every process."""
    return Vocabulary.of_texts(invented_texts(200), max_length=14, size=400, lowercase=True)


def rows_of(
    config: RunConfig, values: Mapping[str, Sequence[Any]], tokenizer: Tokenizer | None = None
) -> InMemoryDataset:
    """Return rows of these values by role, with the ids 0, 1, 2, ..., as read from Arrow."""
    columns = column_names(config).found_in(list(values), where="the test")
    formats = build_formats(config, tokenizer or vocabulary().tokenizer, columns)
    contents = {role: each.decode_all(values[role]) for role, each in formats.items()}
    numbers = pa.array(range(len(next(iter(values.values())))), pa.int64())
    return InMemoryDataset(
        [pa.table(store_all(formats, contents) | {"sample_id": numbers, "label": numbers})], formats
    )


def clicks(num_rows: int, *, num_negatives: Sequence[int], seed: int = 0) -> dict[str, list[Any]]:
    """Return pairs with repeated queries and documents, some with other texts and some with other ids.

    Row i has ``num_negatives[i % len(num_negatives)]`` explicit negatives.
    """
    random, texts = Random(seed), invented_texts(4 * _NUM_DOCUMENTS, seed=1)

    def thing(first_text: int) -> tuple[str, str]:
        number = random.randrange(_NUM_DOCUMENTS)
        in_other_words, renamed = (random.random() < 0.2 for _ in range(2))
        text = texts[first_text + number + _NUM_DOCUMENTS * in_other_words]
        return text, f"{number + _NUM_DOCUMENTS * renamed}"

    queries, documents = ([thing(start) for _ in range(num_rows)] for start in (0, 2 * _NUM_DOCUMENTS))
    negatives = [
        [thing(2 * _NUM_DOCUMENTS) for _ in range(num_negatives[row % len(num_negatives)])]
        for row in range(num_rows)
    ]
    return {
        "query": [text for text, _ in queries],
        "document": [text for text, _ in documents],
        "negatives": [[text for text, _ in row] for row in negatives],
        "query_id": [name for _, name in queries],
        "document_id": [name for _, name in documents],
        "negative_ids": [[name for _, name in row] for row in negatives],
    }


def write_pairs(path: Path, num_pairs: int) -> Path:
    """Write queries and documents with 0 to 3 explicit negatives each to a parquet file."""
    texts, random = invented_texts(num_pairs, seed=1), Random(0)
    rows = [
        {
            "query": f"{' '.join(text.split()[:3])} {number}",
            "document": text,
            "negatives": random.sample(texts[:number] + texts[number + 1 :], random.randint(0, 3)),
        }
        for number, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=64)
    return path


def write_texts(path: Path, num_texts: int) -> Path:
    """Write texts to a parquet file."""
    pq.write_table(pa.table({"text": invented_texts(num_texts)}), path, row_group_size=64)
    return path


def write_captioned(path: Path, num_images: int) -> Path:
    """Write digits, each with a caption, to a parquet file."""
    images, _ = digit_files(num_images)
    table = pa.table({"image": pa.array(images, pa.binary()), "caption": invented_texts(num_images)})
    pq.write_table(table, path, row_group_size=64)
    return path


def noise_images(num_images: int) -> list[bytes]:
    """Return grayscale noise images of 8x8 pixels, as files."""
    pixels = np.random.default_rng(0).integers(0, 256, (num_images, 8, 8), np.uint8)
    return [encode(each) for each in pixels]
