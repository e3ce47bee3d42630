"""The samples of a run: read once and kept in memory, or streamed every epoch."""

from typing import Any, final

import numpy as np
import ray
from numpy.typing import NDArray

from raycl.config import RunConfig, TextConfig
from raycl.data.decode import Decoder, Keep
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, Source
from raycl.data.split import Holdout, make_split
from raycl.data.streaming import StreamingSampler, stream_dataset, stream_source
from raycl.errors import ConfigError, DataError
from raycl.models.build import load_tokenizer
from raycl.models.registry import HUGGING_FACE, TOKENIZER
from raycl.ray_runtime import fetch_tables, object_store_bytes
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.data_set import DataSet, learn_vocabulary
from raycl.training.preflight import check_classes
from raycl.training.transforms import build_formats

JUDGED_PART = 20  # rows in the evaluation fragments of a large data set, per evaluated row


@final
class DataModule:
    """The samples of a run: their number, columns and classes, and how to read them."""

    def __init__(self, config: RunConfig, coordinator: Any, data: Source | ray.data.Dataset) -> None:
        self._config, self._coordinator = config, coordinator
        self._data = DataSet(config, coordinator, data)
        self.columns, self.classes = self._data.columns, self._data.classes
        if config.needs_labels and not self._data.has_labels:
            raise ConfigError(
                f"{config.needs_labels} needs labels, but the samples have none; "
                "name their column with --set data.columns.label=NAME"
            )
        self.num_rows = self._data.num_rows
        self.streamed = self._must_stream()
        self.holdout = self._hold_out()
        self._tokenizer: Tokenizer | None = None

    @property
    def can_be_judged(self) -> bool:
        """Whether the samples allow periodic evaluation: they have labels, or are pairs."""
        return self._config.has_two_towers or self._data.has_labels

    @property
    def is_evaluated(self) -> bool:
        """Whether some samples are held out for the periodic evaluation."""
        return self.holdout.test > 0 and self.can_be_judged

    def learn_vocabulary(self, tokenizer: Tokenizer | None) -> Vocabulary:
        """Count the tokens of the texts, with a new tokenizer unless one is given; required before decoding."""
        vocabulary = learn_vocabulary(self._config.text, tokenizer, self.columns, [self._data.rows])
        self._tokenizer = vocabulary.tokenizer
        check_prompts(self._config.text, vocabulary.tokenizer)
        return vocabulary

    def num_train_expected(self) -> int:
        """Return the number of training rows if all rows are valid."""
        num_candidates = self._num_evaluation_rows() if self._data.source else self.num_rows
        return self.num_rows - round(num_candidates * self.holdout.test)

    def num_read_first(self) -> int:
        """Return the number of rows to read before training; for a click log, the rows that became pairs."""
        if self._data.num_clicks is not None:
            return self._data.num_clicks
        return self._num_evaluation_rows() if self.streamed and self._data.source else self.num_rows

    def rows_to_keep(self) -> ray.data.Dataset | None:
        """Return the decoded rows to keep in memory: all, or only the evaluation rows of a stream, if any."""
        if not self.streamed:
            return self._data.decode(self._decoder())
        if not self.is_evaluated:
            return None
        decoder = self._decoder(self.holdout.is_evaluated, count=self.holdout.is_test)
        return self._data.decode(decoder, self._evaluation_fragments())

    def sample_ids(self, decoded: ray.data.Dataset | None) -> NDArray[np.int64]:
        """Return the distinct training ids, sorted; without ``decoded``, ids of invalid rows as well.

        Raises ``DataError`` for a streamed dataset, whose ids are unknown before it is read.
        """
        if decoded is not None:
            tables = fetch_tables(decoded.select_columns(["sample_id"]))
            found = np.unique(np.concatenate([table["sample_id"].to_numpy() for table in tables]))
            return found[self.holdout.is_train(found)]
        if self._data.source is None:
            raise DataError(
                "a memory bank needs the ids of all samples before the first step, which a streamed dataset does "
                "not provide; give the address of the data, or set data.cache=materialize"
            )
        evaluated = self._evaluation_fragments() if self.holdout.test else ()
        others = [fragment for fragment in self._data.fragments if fragment not in set(evaluated)]
        ids = self._data.source.sample_ids(evaluated)
        return np.unique(
            np.concatenate([ids[self.holdout.is_train(ids)], self._data.source.sample_ids(others)])
        )

    def check_classes(self, decoded: ray.data.Dataset) -> None:
        """Raise ``ConfigError`` if the classes of all training rows form no batch; count rows that are never drawn."""
        if self._config.needs_labels is None:
            return
        tables = fetch_tables(decoded.select_columns(["sample_id", "label"]))
        ids, label = (
            np.concatenate([each[name].to_numpy() for each in tables]) for name in ("sample_id", "label")
        )
        skipped = check_classes(self._config, label[self.holdout.is_train(ids)])
        ray.get(self._coordinator.add_rows.remote("rows of no batch", ReadStats(skipped=skipped)))
        for cause, count in skipped.items():
            self._coordinator.add_notice.remote(f"{count} samples {cause} are never drawn")

    def stream(self) -> StreamingSampler:
        """Return the training rows, read again every epoch."""
        decoder, seed = self._decoder(self.holdout.is_train), self._config.seed
        if self._data.source is None:
            opened = stream_dataset(
                self._data.dataset, self.columns, decoder, seed=seed, classes=self.classes
            )
        else:
            first_ids = {fragment.first_id for fragment in self._data.fragments}
            evaluated = {fragment.first_id for fragment in self._evaluation_fragments()}
            kept_whole = frozenset(first_ids - evaluated)
            opened = stream_source(self._data.source, decoder, seed=seed, kept_whole=kept_whole)
        return StreamingSampler(
            open_epoch=opened,
            formats=decoder.formats,
            seed=seed,
            shuffle_buffer_size=self._config.data.shuffle_buffer_size,
            length_buckets=self._config.text.length_buckets,
            samples_per_class=self._config.data.samples_per_class,
        )

    def _decoder(self, keep: Keep | None = None, *, count: Keep | None = None) -> Decoder:
        return Decoder(
            formats=build_formats(self._config, self._tokenizer, self.columns),
            coordinator=self._coordinator,
            holdout=self.holdout,
            keep=keep,
            count=count,
            counts_rows=self._data.num_clicks is None,
        )

    def _must_stream(self) -> bool:
        """Whether the decoded rows are too many for half of a node's object store."""
        data, text = self._config.data, self._config.text
        if data.cache != "auto":
            return data.cache == "stream"
        image = data.channels * data.resolved_decode_size**2 if data.kind in ("image", "image_text") else 0
        num_tokens = {"image": 0, "pairs": text.max_length + text.longest}.get(data.kind, text.max_length)
        bytes_per_row = image + 4 * num_tokens  # texts have at most their maximum length
        return self.num_rows * bytes_per_row > object_store_bytes() / 2

    def _hold_out(self) -> Holdout:
        settings = self._config.evaluation
        if settings.every_epochs == 0 or not self.can_be_judged:
            return Holdout(seed=self._config.seed)
        # A stream holds out rows of a few fragments only; with all rows in memory, any row may be held out.
        in_fragments = self._data.source is not None and self.streamed
        num_rows = self._num_evaluation_rows() if in_fragments else self.num_rows
        return make_split(
            num_rows, num_test=settings.num_test, num_train=settings.num_train, seed=self._config.seed
        )

    def _evaluation_fragments(self) -> tuple[Fragment, ...]:
        """Return enough evenly spaced fragments for the evaluation; all fragments of a small data set."""
        fragments = self._data.fragments
        settings = self._config.evaluation
        enough = JUDGED_PART * (settings.num_test + settings.num_train)
        return fragments[:: max(1, self.num_rows // enough)]

    def _num_evaluation_rows(self) -> int:
        return sum(fragment.num_rows for fragment in self._evaluation_fragments())


def known_tokenizer(config: RunConfig, output: Place, *, resumed: bool) -> Tokenizer | None:
    """Return the tokenizer of a resumed run, of the configuration, or of a pretrained model.

    Raises ``ConfigError`` if the configuration names another tokenizer than the pretrained model's own.
    """
    if resumed and (output / TOKENIZER).exists():
        return load_tokenizer((output / TOKENIZER).uri)
    asked = None if config.text.tokenizer is None else load_tokenizer(config.text.tokenizer)
    encoder = config.text_encoder if config.data.kind == "image_text" else config.encoder
    if not encoder.name.startswith(HUGGING_FACE) or not encoder.kwargs.get("pretrained", True):
        return asked
    folder = encoder.name.removeprefix(HUGGING_FACE)
    place = Place(folder) / TOKENIZER
    if not place.exists():
        raise ConfigError(
            f"the model in {folder} has no {TOKENIZER} beside it, and its weights require its own "
            "tokenizer; save its fast tokenizer there, or set encoder.kwargs.pretrained=false"
        )
    own = Tokenizer(place.read_text())
    if asked is not None and asked.fingerprint != own.fingerprint:
        raise ConfigError(
            f"text.tokenizer {config.text.tokenizer} is not the one that {encoder.name} was trained with; remove "
            "it, or set encoder.kwargs.pretrained=false"
        )
    return own


def check_prompts(text: TextConfig, tokenizer: Tokenizer) -> None:
    """Raise ``ConfigError`` if a prompt leaves no room for a text."""
    for name, prompt, max_length in (
        ("query_prompt", text.query_prompt, text.max_length),
        ("document_prompt", text.document_prompt, text.max_document_length or text.max_length),
    ):
        length = tokenizer.num_prompt_tokens(prompt)
        if length >= max_length:
            raise ConfigError(
                f"text.{name} has {length} tokens, and texts are truncated after {max_length}; "
                "shorten it, or raise text.max_length"
            )
