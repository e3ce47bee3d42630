"""The tokenizer of a run: the user's, the one it began with, or one trained on its own texts."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import ray

from raycl.cluster import unwrap_ray_errors
from raycl.config import RunConfig, TextConfig
from raycl.data.columns import ColumnNames
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError, StorageError
from raycl.models.registry import HUGGING_FACE, TOKENIZER
from raycl.storage import Place
from raycl.tokenization import BrokenTextError, Tokenizer, Vocabulary, read_text

ROLES = ("text", "caption", "query", "document", "negatives")


def load_tokenizer(uri: str) -> Tokenizer:
    """Read a ``tokenizer.json``, or that of a run; raises ``StorageError`` or ``ConfigError``."""
    place = Place(uri)
    if not uri.endswith(".json"):
        place = place / TOKENIZER
    if not place.exists():
        raise StorageError(f"there is no tokenizer at {place}; give a tokenizer.json, or the output of a run")
    return Tokenizer.from_json(place.read_text())


def known_tokenizer(config: RunConfig, output: Place, *, resumed: bool) -> Tokenizer | None:
    """Return the tokenizer that the run began with, that its configuration names, or a pretrained model's.

    Raises ``ConfigError`` if a pretrained model would be given another tokenizer than its own.
    """
    if resumed and (output / TOKENIZER).exists():
        return load_tokenizer((output / TOKENIZER).uri)
    asked = None if config.text.tokenizer is None else load_tokenizer(config.text.tokenizer)
    encoder = config.text_encoder if config.data.kind == "image_text" else config.encoder
    if not encoder.name.startswith(HUGGING_FACE) or not encoder.arguments.get("pretrained", True):
        return asked
    own = _tokenizer_of_model(encoder.name.removeprefix(HUGGING_FACE))
    if asked is not None and asked.fingerprint != own.fingerprint:
        raise ConfigError(
            f"text.tokenizer {config.text.tokenizer} is not the one that {encoder.name} was trained with; leave it "
            "out, or set encoder.arguments.pretrained=false"
        )
    return own


def _tokenizer_of_model(folder: str) -> Tokenizer:
    place = Place(folder) / TOKENIZER
    if not place.exists():
        raise ConfigError(
            f"the model in {folder} has no {TOKENIZER} beside it, and its weights mean nothing to another "
            "tokenizer; save its fast tokenizer there, or set encoder.arguments.pretrained=false"
        )
    return Tokenizer.from_json(place.read_text())


def find_vocabulary(
    config: RunConfig,
    tokenizer: Tokenizer | None,
    columns: ColumnNames,
    source: Source | None,
    dataset: ray.data.Dataset | None,
) -> Vocabulary:
    """Count the tokens of the run's texts, by a tokenizer trained on them unless there is one.

    Raises ``DataError`` if there is no text at all.
    """
    only_texts = replace(columns, **{role: None for role in columns.asked if role not in ROLES})
    return count_tokens(config.text, tokenizer, only_texts, source, dataset)


def count_tokens(
    text: TextConfig,
    tokenizer: Tokenizer | None,
    columns: ColumnNames,
    source: Source | None,
    dataset: ray.data.Dataset | None,
) -> Vocabulary:
    """Count the tokens of these columns, as :func:`find_vocabulary` does."""

    def count() -> Vocabulary:
        texts = _texts_of_source(source, columns) if source else _texts_of_dataset(dataset, columns)
        found = list(islice(texts, text.num_texts))
        if not found:
            raise DataError("there is not one sound text to train a tokenizer on; look at the text columns")
        return Vocabulary.of_texts(
            found,
            tokenizer,
            max_length=text.longest,
            size=text.vocabulary_size,
            lowercase=text.lowercase,
        )

    if source is None:
        return count()
    with unwrap_ray_errors():  # near the data, not where the command was typed
        return ray.get(ray.remote(num_cpus=1)(count).remote())


def _texts_of_source(source: Source, columns: ColumnNames) -> Iterator[str]:
    described = replace(source, columns=columns)
    # Of more texts than are looked at, those of pieces all over the set.
    for number in np.random.default_rng(0).permutation(len(source.pieces)):
        piece = source.pieces[number]
        for rows in described.read(piece):
            for values in rows.values.values():
                yield from _sound_texts(values)


def _texts_of_dataset(dataset: ray.data.Dataset | None, columns: ColumnNames) -> Iterator[str]:
    assert dataset is not None, "a run has a source or a dataset"
    names = list(columns.contents.values())
    batches: Iterator[Any] = iter(
        dataset.select_columns(names).iter_batches(batch_format="pyarrow", batch_size=1_024)
    )
    for batch in batches:
        for name in names:
            yield from _sound_texts(batch[name].to_pylist())


def _sound_texts(values: list[Any]) -> Iterator[str]:
    for value in values:
        for text in value if isinstance(value, list | tuple) else [value]:
            try:
                yield read_text(text)
            except BrokenTextError:
                continue  # counted when the rows are decoded
