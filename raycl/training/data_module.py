"""The samples of a run, wherever they come from: read once and held, or read anew every epoch."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any, final

import numpy as np
import ray
from numpy.typing import NDArray

from raycl.config import RunConfig, TextConfig
from raycl.data.click_logs import check_labels, group_dataset, group_source, grouped_columns
from raycl.data.columns import ColumnNames
from raycl.data.coordinator import rows_in
from raycl.data.decode import Decoder, Keep, classes_of, columns_of, decode_dataset, decode_source
from raycl.data.sources import Fragment, Source
from raycl.data.split import Holdout, make_split
from raycl.data.streaming import StreamingSampler, stream_dataset, stream_source
from raycl.errors import ConfigError, DataError
from raycl.models.registry import HUGGING_FACE, TOKENIZER
from raycl.ray_runtime import fetch_tables, object_store_bytes, unwrap_ray_errors
from raycl.storage import Place
from raycl.tokenization import BrokenTextError, Tokenizer, Vocabulary, read_text
from raycl.training import build
from raycl.training.preflight import column_names
from raycl.training.resume import load_tokenizer

JUDGED_PART = 20  # of a large set, one row in so many is judged on


@final
class DataModule:
    """The samples of a run, wherever they come from: how many, and how they are opened.

    Labeled pairs are grouped by their queries first, which reads them whole.
    """

    def __init__(
        self, config: RunConfig, coordinator: Any, source: Source | None, dataset: ray.data.Dataset | None
    ) -> None:
        self._config, self._coordinator, self._source, self._dataset = config, coordinator, source, dataset
        asked = column_names(config)
        self._num_clicks: int | None = None
        self.columns = source.columns if source is not None else columns_of(_given(dataset), asked)
        if config.data.kind == "pairs":
            check_labels(self.columns)
            if self.columns.label is not None:
                self._group()
        self.classes = (
            source.classes if source is not None else classes_of(_given(self._dataset), self.columns)
        )
        self.num_rows = self._source.num_rows if self._source is not None else _given(self._dataset).count()
        self.holdout = self._hold_out()
        self._vocabulary: Vocabulary | None = None

    @property
    def can_be_judged(self) -> bool:
        """Whether the periodic judge has what it needs: labels, or pairs."""
        if self._config.has_two_towers:
            return True
        if self._source is not None:
            return self._source.has_labels
        return self.columns.label is not None

    def learn_vocabulary(self, tokenizer: Tokenizer | None) -> Vocabulary:
        """Count the tokens of the texts, by a new tokenizer unless one is given; comes before any decoding."""
        self._vocabulary = find_vocabulary(self._config, tokenizer, self.columns, self._source, self._dataset)
        return self._vocabulary

    def must_stream(self) -> bool:
        """Whether the decoded rows are too many for half of a node's object store."""
        data = self._config.data
        if data.cache != "auto":
            return data.cache == "stream"
        return self.num_rows * self._bytes_a_row() > object_store_bytes() / 2

    def num_train_expected(self) -> int:
        """Return how many rows are trained on if none is broken."""
        num_judged = self.num_rows if self._source is None else _num_rows(self._judged_pieces())
        return self.num_rows - round(num_judged * self.holdout.test)

    def num_read_first(self, streamed: bool) -> int:
        """Return how many rows are read before training starts; of a click log those that became pairs."""
        if self._num_clicks is not None:
            return self._num_clicks
        return _num_rows(self._judged_pieces()) if streamed and self._source is not None else self.num_rows

    def all(self) -> ray.data.Dataset:
        """Return all rows, decoded."""
        return self._decode(self._decoder())

    def to_judge_on(self) -> ray.data.Dataset | None:
        """Return the rows of the periodic judge, or None if there is no judging."""
        if self.holdout.test == 0 or not self.can_be_judged:
            return None
        return self._decode(
            self._decoder(self.holdout.is_evaluated, count=self.holdout.is_test), self._judged_pieces()
        )

    def sample_ids(self, decoded: ray.data.Dataset | None) -> NDArray[np.int64]:
        """Return the distinct ids to train on, sorted; of rows not yet ``decoded`` those of broken ones too.

        Raises ``DataError`` for a streamed dataset, whose ids nobody knows beforehand.
        """
        if decoded is not None:
            tables = fetch_tables(decoded.select_columns(["sample_id"]))
            found = np.unique(np.concatenate([table["sample_id"].to_numpy() for table in tables]))
            return found[self.holdout.is_train(found)]
        if self._source is None:
            raise DataError(
                "a memory bank needs the ids of all samples before the first step, and a streamed dataset does "
                "not tell them; give the data by their address, or set data.cache=materialize"
            )
        judged = self._judged_pieces() if self.holdout.test else ()
        others = [piece for piece in self._source.pieces if piece not in set(judged)]
        ids = self._source.sample_ids(judged)
        return np.unique(np.concatenate([ids[self.holdout.is_train(ids)], self._source.sample_ids(others)]))

    def stream(self) -> StreamingSampler:
        """Return the rows to train on, to be read anew every epoch."""
        decoder, seed = self._decoder(self.holdout.is_train), self._config.seed
        judged = {piece.first_id for piece in self._judged_pieces()}
        opened = (
            stream_source(
                self._source,
                decoder,
                seed=seed,
                kept_whole=frozenset(
                    piece.first_id for piece in self._source.pieces if piece.first_id not in judged
                ),
            )
            if self._source is not None
            else stream_dataset(_given(self._dataset), self.columns, decoder, seed=seed, classes=self.classes)
        )
        return StreamingSampler(
            open_epoch=opened,
            formats=decoder.formats,
            seed=seed,
            shuffle_buffer_size=self._config.data.shuffle_buffer_size,
            length_buckets=self._config.text.length_buckets,
        )

    def _decode(self, decoder: Decoder, pieces: tuple[Fragment, ...] | None = None) -> ray.data.Dataset:
        if self._source is not None:
            return decode_source(self._source, decoder, pieces)
        return decode_dataset(_given(self._dataset), self.columns, decoder, classes=self.classes)

    def _decoder(self, keep: Keep | None = None, *, count: Keep | None = None) -> Decoder:
        return Decoder(
            formats=build.modality(self._config, self._vocabulary).formats(self.columns),
            logbook=self._coordinator,
            holdout=self.holdout,
            keep=keep,
            count=count,
            counts_rows=self._num_clicks is None,
        )

    def _group(self) -> None:
        grouped = (
            group_source(self._source, self._coordinator)
            if self._source is not None
            else group_dataset(_given(self._dataset), self.columns, self._coordinator)
        )
        self._source, self._dataset = None, grouped.materialize()
        rows = rows_in(self._coordinator)
        rows.check(self._config.data.max_invalid_fraction)
        self._num_clicks = rows.num_rows
        self.columns = grouped_columns(self.columns)
        if self._dataset.count() == 0:
            raise DataError(
                "no query has a document of label 1; a run learns from pairs that belong together"
            )

    def _bytes_a_row(self) -> int:
        """Return what a decoded row takes, roughly: of texts the most that it may."""
        data, text = self._config.data, self._config.text
        image = data.channels * data.resolved_decode_size**2 if data.kind in ("image", "image_text") else 0
        num_tokens = {"image": 0, "pairs": text.max_length + text.longest}.get(data.kind, text.max_length)
        return image + 4 * num_tokens

    def _hold_out(self) -> Holdout:
        settings = self._config.evaluation
        if settings.every_epochs == 0 or not self.can_be_judged:
            return Holdout(seed=self._config.seed)
        # Of a stream, whole pieces are spared; of rows at hand, each may be held out.
        in_pieces = self._source is not None and self.must_stream()
        num_rows = _num_rows(self._judged_pieces()) if in_pieces else self.num_rows
        return make_split(
            num_rows, num_test=settings.num_test, num_train=settings.num_train, seed=self._config.seed
        )

    def _judged_pieces(self) -> tuple[Fragment, ...]:
        """Return pieces spread over the set, enough to judge on: all of them, if it is not large."""
        pieces = self._source.pieces if self._source is not None else ()
        settings = self._config.evaluation
        enough = JUDGED_PART * (settings.num_test + settings.num_train)
        return pieces[:: max(1, self.num_rows // enough)]


def _num_rows(pieces: tuple[Fragment, ...]) -> int:
    return sum(piece.num_rows for piece in pieces)


def _given(dataset: ray.data.Dataset | None) -> ray.data.Dataset:
    assert dataset is not None, "a run has a source or a dataset"
    return dataset


ROLES = ("text", "caption", "query", "document", "negatives")


def known_tokenizer(config: RunConfig, output: Place, *, resumed: bool) -> Tokenizer | None:
    """Return the tokenizer that the run began with, that its configuration names, or a pretrained model's.

    Raises ``ConfigError`` if a pretrained model would be given another tokenizer than its own.
    """
    if resumed and (output / TOKENIZER).exists():
        return load_tokenizer((output / TOKENIZER).uri)
    asked = None if config.text.tokenizer is None else load_tokenizer(config.text.tokenizer)
    encoder = config.text_encoder if config.data.kind == "image_text" else config.encoder
    if not encoder.name.startswith(HUGGING_FACE) or not encoder.kwargs.get("pretrained", True):
        return asked
    own = _tokenizer_of_model(encoder.name.removeprefix(HUGGING_FACE))
    if asked is not None and asked.fingerprint != own.fingerprint:
        raise ConfigError(
            f"text.tokenizer {config.text.tokenizer} is not the one that {encoder.name} was trained with; leave it "
            "out, or set encoder.kwargs.pretrained=false"
        )
    return own


def _tokenizer_of_model(folder: str) -> Tokenizer:
    place = Place(folder) / TOKENIZER
    if not place.exists():
        raise ConfigError(
            f"the model in {folder} has no {TOKENIZER} beside it, and its weights mean nothing to another "
            "tokenizer; save its fast tokenizer there, or set encoder.kwargs.pretrained=false"
        )
    return Tokenizer(place.read_text())


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
        found = list(islice(texts, text.tokenizer_train_size))
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
