"""The samples of a run: read once and kept in memory, or streamed every epoch."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import numpy as np
import ray
from numpy.typing import NDArray

from raycl.config import RunConfig, TextConfig
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder
from raycl.data.labels import check_label_names
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, Source
from raycl.data.split import Holdout, Keep, make_split
from raycl.data.streaming import StreamingSampler, stream_dataset, stream_source
from raycl.errors import ConfigError, DataError
from raycl.models.build import load_tokenizer
from raycl.models.registry import HUGGING_FACE, TOKENIZER
from raycl.ray_runtime import is_own_ray, object_store_bytes
from raycl.records import READ_ROWS
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.data_set import DataSet, DecodedRows, learn_vocabulary, texts_per_row
from raycl.training.guide import GuideTables, read_guide
from raycl.training.job import EVALUATION_PREFIX, EvaluationRows
from raycl.training.preflight import check_classes, check_has_labels, describe_unlabeled, id_columns
from raycl.training.transforms import build_formats

# Decoded rows that the driver of a Ray on this machine reads itself; short rows take time too.
_HERE_BYTES, _ROW_BYTES = 64 * 2**20, 4_096
EVALUATION_PART = 20  # rows in the evaluation fragments of a large data set, per evaluated row


@final
class DataModule:
    """The samples of a run: their number, columns and classes, and how to read them."""

    def __init__(
        self,
        config: RunConfig,
        coordinator: Any,
        data: Sequence[Source | ray.data.Dataset],
        evaluation: Source | None = None,
    ) -> None:
        self._config, self._coordinator = config, coordinator
        is_one = len(data) == 1
        self.data_sets = [
            DataSet(config, coordinator, each, number=number, prefix="" if is_one else f"{number}: ")
            for number, each in enumerate(data)
        ]
        self._first = self.data_sets[0]  # the only one of a stream
        _check_columns(self.data_sets)
        if not is_one:
            _share_classes(self.data_sets)
        self.columns, self.classes = self._first.columns, self._first.classes
        self._evaluation = evaluation and self._matched(evaluation)
        check_has_labels(config, self._first.has_labels)
        self.num_rows = sum(each.num_rows for each in self.data_sets)
        self.streamed = must_stream(
            config, [(each.rows, each.columns, each.num_rows) for each in self.data_sets]
        )
        if self.streamed and not is_one:
            raise ConfigError(
                f"the {len(data)} data sets are larger than half of a node's object store, and only one data set "
                "can be streamed; set data.cache=materialize, or give less data"
            )
        self.holdout = self._hold_out()
        self._tokenizer: Tokenizer | None = None
        self.corpus_fingerprint: int | None = None  # of the texts of ``text.corpus``, once they were read

    @property
    def can_be_evaluated(self) -> bool:
        """Whether the samples allow periodic evaluation: they have labels, or are pairs."""
        return self._config.has_two_towers or self._first.has_labels or self._evaluation is not None

    @property
    def is_evaluated(self) -> bool:
        """Whether there are samples for the periodic evaluation."""
        return self._evaluation is not None or self.holdout.test > 0

    def learn_vocabulary(self, tokenizer: Tokenizer | None, corpus: Source | None = None) -> Vocabulary:
        """Train a tokenizer unless one is given, and count tokens if an encoder uses it; required before decoding.

        ``corpus`` holds more texts for both; a notice counts its invalid ones.
        """
        vocabulary, stats = learn_vocabulary(
            self._config.text,
            tokenizer,
            self.columns,
            [each.rows for each in self.data_sets],
            corpus=corpus,
            counted=self._config.counts_tokens,
        )
        self.corpus_fingerprint = stats.fingerprint if stats.num_rows else None
        if stats.num_invalid:
            counts = f"{stats.num_invalid:,} of {stats.num_rows:,} texts of text.corpus"
            self._coordinator.add_notice.remote(
                f"{counts} are invalid and were skipped ({stats.describe_invalid()})"
            )
        self._tokenizer = vocabulary.tokenizer
        check_prompts(self._config.text, vocabulary.tokenizer)
        return vocabulary

    def num_train(self, decoded: Sequence[DecodedRows]) -> list[int]:
        """Return the number of training rows of each data set; of a stream, if all its rows are valid."""
        if self.streamed:
            return [self.num_train_expected()]
        # The coordinator counts equal blocks of a Ray Dataset without ids once, as it counts a block that is read again.
        return [
            each.stats().num_train if each.source else int(self.holdout.is_train(_ids_of(rows)).sum())
            for each, rows in zip(self.data_sets, decoded, strict=True)
        ]

    def num_train_expected(self) -> int:
        """Return the number of training rows if all rows are valid."""
        num_candidates = self._num_evaluation_rows() if self._first.source else self.num_rows
        return self.num_rows - round(num_candidates * self.holdout.test)

    def num_read_first(self) -> int:
        """Return the number of rows to read before training; for a click log, the rows that became pairs."""
        if self.streamed and self._first.source:
            return self._num_evaluation_rows()
        return sum(each.num_read for each in self.data_sets)

    def read_rows(self) -> list[DecodedRows]:
        """Read the rows to keep in memory by data set: all, or only a stream's evaluation rows, if any."""
        here = self._is_read_here(self.data_sets)
        if not self.streamed:
            return [each.read(self._decoder(each), here=here) for each in self.data_sets]
        if self.holdout.reference == 0:
            return []
        decoder = self._decoder(self._first, self.holdout.is_evaluated, count=self.holdout.is_test)
        return [self._first.read(decoder, self._evaluated, here=here)]

    def read_evaluation_rows(self, decoded: Sequence[DecodedRows]) -> EvaluationRows | None:
        """Read the rows of ``evaluation.data``, if any; ``decoded`` are the training rows in memory.

        Raises ``DataError`` if too many are invalid.
        """
        if self._evaluation is None:
            return None
        settings, seed = self._config.evaluation, self._config.seed
        data_set = DataSet(self._config, self._coordinator, self._evaluation, prefix=EVALUATION_PREFIX)
        has_references = self._config.has_two_towers or any(map(self._has_labeled_reference, decoded))
        split = make_split(
            data_set.num_rows,
            num_test=settings.num_test,
            num_train=0 if has_references else settings.num_train,
            seed=seed,
            max_fraction=1.0 if has_references else 0.5,
        )
        decoder = replace(
            self._decoder(data_set, split.is_evaluated),
            formats=build_formats(self._config, self._tokenizer, data_set.columns),
            holdout=Holdout(seed=seed, test=1.0),  # none is a training row
        )
        rows = data_set.read(decoder, here=self._is_read_here([data_set]))
        data_set.stats().check(self._config.data.max_invalid_fraction)
        return EvaluationRows(blocks=tuple(rows.blocks()), columns=data_set.columns, split=split)

    def _has_labeled_reference(self, decoded: DecodedRows) -> bool:
        """Whether a training row that the periodic kNN may compare with has a label; -1 and null are none."""
        return any(
            bool(
                (
                    table["label"].to_numpy()[self.holdout.is_reference(table["sample_id"].to_numpy())] >= 0
                ).any()
            )
            for table in decoded.columns(["sample_id", "label"])
        )

    def counts(self, steps: Sequence[int]) -> dict[str, dict[str, Any]]:
        """Return the steps and the numbers of rows of each of several data sets by name."""
        # A single data set has no steps of its own.
        pairs = list(zip(self.data_sets, steps, strict=True)) if steps else []
        return {each.name: {"steps": number, **each.counts()} for each, number in pairs}

    def sample_ids(self, decoded: Sequence[DecodedRows]) -> NDArray[np.int64]:
        """Return the distinct training ids, sorted; of a stream, ids of invalid rows as well.

        Raises ``DataError`` for a streamed dataset, whose ids are unknown before it is read.
        """
        if not self.streamed:
            found = np.unique(np.concatenate([_ids_of(each) for each in decoded]))
            return found[self.holdout.is_train(found)]
        if self._first.source is None:
            raise DataError(
                "a memory bank and negatives.mined need the ids of all samples before the first step, which a streamed "
                "dataset does not provide; give the address of the data, or set data.cache=materialize"
            )
        return streamed_ids(self._config, self._first.source, self.holdout)

    def check_classes(self, decoded: Sequence[DecodedRows]) -> None:
        """Raise ``ConfigError`` if the classes of a data set's training rows form no batch.

        Counts the rows that are never drawn, and reports those without a label. The rows of a stream are unknown.
        """
        if self._config.needs_labels is None or self.streamed:
            return
        for data_set, rows in zip(self.data_sets, decoded, strict=True):
            tables = rows.columns(["sample_id", "label"])
            ids, label = (
                np.concatenate([each[name].to_numpy() for each in tables]) for name in ("sample_id", "label")
            )
            label = label[self.holdout.is_train(ids)]
            skipped = check_classes(self._config, label)
            name = f"{data_set.prefix}rows of no batch"
            ray.get(self._coordinator.add_rows.remote(name, ReadStats(skipped=skipped)))
            lines = [f"{count} samples {cause} are never drawn" for cause, count in skipped.items()]
            for line in lines + describe_unlabeled(self._config, label):
                self._coordinator.add_notice.remote(line)

    def guide(self, decoded: Sequence[DecodedRows]) -> GuideTables | None:
        """Read the guide's embeddings of these rows, if the run has a guide.

        Raises ``DataError`` if the data have no ids, or the guide has not one embedding of each id.
        """
        settings = self._config.negatives
        if settings.guide.query is None:
            return None
        is_pairs = self._config.data.kind == "pairs"
        names = id_columns(self.columns, explicit=bool(settings.explicit)) if is_pairs else []
        guide = read_guide(settings.guide, decoded[0].columns(["sample_id", *names]), names)
        check_width(self._config, guide.dim)
        return guide

    def stream(self, output: Place) -> StreamingSampler:
        """Return the training rows, read again every epoch; restore the counts of fragments in a resumed output."""
        decoder, seed = self._decoder(self._first, self.holdout.is_train), self._config.seed
        if self._first.source is None:
            opened = stream_dataset(
                self._first.dataset, self.columns, decoder, seed=seed, classes=self.classes
            )
        else:
            kept_whole = fragments_kept_whole(self._config, self._first.source)
            uri = self._first.source.fragments[0].uri
            ray.get(self._coordinator.restore_rows.remote(output / READ_ROWS, uri))
            decoder = replace(decoder, fingerprints=True)
            opened = stream_source(self._first.source, decoder, seed=seed, kept_whole=kept_whole)
        return StreamingSampler(
            open_epoch=opened,
            formats=decoder.formats,
            seed=seed,
            shuffle_buffer_size=self._config.data.shuffle_buffer_size,
            length_buckets=self._config.text.length_buckets,
            samples_per_class=self._config.data.samples_per_class,
        )

    def _decoder(self, data_set: DataSet, keep: Keep | None = None, *, count: Keep | None = None) -> Decoder:
        return Decoder(
            formats=build_formats(self._config, self._tokenizer, self.columns),
            coordinator=self._coordinator,
            holdout=self.holdout,
            keep=keep,
            count=count,
            counts_rows=data_set.num_clicks is None,
            prefix=data_set.prefix,
        )

    @property
    def _has_voters(self) -> bool:
        """Whether the training rows are compared with those to evaluate: they have a column of labels, or are pairs."""
        return self._config.has_two_towers or (self._first.has_labels and self._first.classes != ())

    def _lack_labels(self) -> bool:
        """Read the labels of the training rows; return whether all are missing. Those of a Ray Dataset are unknown."""
        return all(
            each.source is not None and bool((each.source.labels() < 0).all()) for each in self.data_sets
        )

    def _matched(self, evaluation: Source) -> Source:
        """Return the rows of ``evaluation.data`` with the numbers of the training rows' classes.

        Raises ``DataError`` if they have other columns, or classes that no training row has.
        """
        own, theirs = (_roles(each) for each in (self._first.columns_of_file, evaluation.columns))
        if own != theirs:
            raise DataError(
                f"evaluation.data ({evaluation.uri}) has the columns {', '.join(theirs)}, and the training rows have "
                f"{', '.join(own)}; give both the same columns"
            )
        other_kinds = (evaluation.classes is None) != (self.classes is None)
        if not self._has_voters or self._config.has_two_towers or (other_kinds and self._lack_labels()):
            self.classes = self.classes or evaluation.classes
            return evaluation
        sources = [each.source for each in self.data_sets] + [evaluation]
        check_label_names(
            (each and each.label_names for each in sources), where="the training rows and evaluation.data"
        )
        if other_kinds:
            kinds = ("integers", "text") if evaluation.classes is None else ("text", "integers")
            raise DataError(
                f"the labels of evaluation.data are {kinds[0]}, and those of the training rows are {kinds[1]}; "
                "give integers or text in both"
            )
        if unknown := set(evaluation.classes or ()) - set(self.classes or ()):
            raise DataError(
                f"evaluation.data has the class {min(unknown)!r}, which no training row has; give rows of the classes of "
                "the training rows"
            )
        return replace(evaluation, classes=self.classes)

    def _is_read_here(self, data_sets: Sequence[DataSet]) -> bool:
        """Whether this process decodes the rows, which are few: Ray would start processes for that, for seconds."""
        data = [(each.source, each.columns, each.num_rows) for each in data_sets if each.source]
        if not is_own_ray() or sum(each.num_rows for each in data_sets) * _ROW_BYTES > _HERE_BYTES:
            return False
        return decoded_bytes(self._config, data) <= _HERE_BYTES

    def _hold_out(self) -> Holdout:
        # A stream holds out rows of a few fragments only; with all rows in memory, any row may be held out.
        in_fragments = self._first.source is not None and self.streamed
        num_rows = self._num_evaluation_rows() if in_fragments else self.num_rows
        return hold_out(self._config, num_rows, can_be_evaluated=self._has_voters)

    @property
    def _evaluated(self) -> tuple[Fragment, ...]:
        source = self._first.source
        return () if source is None else evaluation_fragments(self._config, source)

    def _num_evaluation_rows(self) -> int:
        return sum(fragment.num_rows for fragment in self._evaluated)


def must_stream(
    config: RunConfig, data_sets: Sequence[tuple[Source | ray.data.Dataset, ColumnNames, int]]
) -> bool:
    """Return whether a run reads its rows again in each epoch: if they could fill half of a node's object store.

    ``data_sets`` are rows with their columns and their number.
    """
    if config.data.cache != "auto":
        return config.data.cache == "stream"
    return decoded_bytes(config, data_sets) > object_store_bytes() / 2


def decoded_bytes(
    config: RunConfig, data_sets: Sequence[tuple[Source | ray.data.Dataset, ColumnNames, int]]
) -> float:
    """Return the size of all rows after they are decoded, at most; ``data_sets`` as for :func:`must_stream`."""
    data, text = config.data, config.text
    image = data.channels * data.resolved_decode_size**2 if data.kind in ("image", "image_text") else 0
    # Texts have at most their maximum length.
    of_document = text.max_document_length or text.max_length
    length = {"document": of_document, "negatives": of_document}
    num_bytes = 0.0
    for rows, columns, num_rows in data_sets:
        counts = texts_per_row(rows, columns) if num_rows else {}
        num_tokens = sum(count * length.get(role, text.max_length) for role, count in counts.items())
        num_bytes += num_rows * (image + 4 * num_tokens)
    return num_bytes


def _check_columns(data_sets: Sequence[DataSet]) -> None:
    """Raise ``DataError`` unless all data sets have the same columns, and all of them labels or none."""
    first = data_sets[0]
    for each in data_sets[1:]:
        is_same = _compared(each.columns) == _compared(first.columns)
        if is_same and each.has_labels == first.has_labels:
            continue
        remedy = "the same columns"
        if is_same:
            remedy = (
                "labels, or none of them; a column label of parquet files may hold null for rows without one"
            )
        raise DataError(
            f"{first.name} has {_listed(first)}, and {each.name} has {_listed(each)}; give all data sets {remedy}"
        )


def _roles(columns: ColumnNames) -> list[str]:
    """Return the roles of the columns that the periodic evaluation reads, besides labels."""
    return [
        role for role in columns.contents if role not in ("negatives", "negative_ids", "query_id", "weight")
    ]


def _compared(columns: ColumnNames) -> ColumnNames:
    """Return the columns without the names of those that a folder of images does not have."""
    return replace(columns, label=None, image=columns.image and "image")


def _ids_of(decoded: DecodedRows) -> NDArray[np.int64]:
    """Return the ids of all decoded rows."""
    tables = decoded.columns(["sample_id"])
    return np.concatenate([np.empty(0, np.int64), *(table["sample_id"].to_numpy() for table in tables)])


def _listed(data_set: DataSet) -> str:
    columns = data_set.columns_of_file
    named = list(columns.asked.values())
    is_in_folders = data_set.has_labels and columns.label is None
    return f"the columns {', '.join(named)}{' and class folders' if is_in_folders else ''}"


def _share_classes(data_sets: Sequence[DataSet]) -> None:
    """Number the text labels of all data sets by the names of all classes; integers are the same class if equal."""
    check_label_names((each.source and each.source.label_names for each in data_sets), where="the data sets")
    names = {name for each in data_sets for name in each.classes or ()}
    for each in data_sets if names else ():
        if each.classes is None:
            raise DataError(
                f"the labels of {each.name} are integers, and those of another data set are text; "
                "give integers or text in all data sets"
            )
        each.use_classes(tuple(sorted(names)))


def evaluation_fragments(config: RunConfig, source: Source) -> tuple[Fragment, ...]:
    """Return enough evenly spaced fragments of a stream for the evaluation; all fragments of a small source."""
    settings = config.evaluation
    enough = EVALUATION_PART * (settings.num_test + settings.num_train)
    return source.fragments[:: max(1, source.num_rows // enough)]


def fragments_kept_whole(config: RunConfig, source: Source) -> frozenset[int]:
    """Return the first ids of the fragments of a stream that no row is held out of."""
    evaluated = {fragment.first_id for fragment in evaluation_fragments(config, source)}
    return frozenset({fragment.first_id for fragment in source.fragments} - evaluated)


def streamed_ids(config: RunConfig, source: Source, holdout: Holdout) -> NDArray[np.int64]:
    """Return the distinct training ids of a stream, sorted, ids of invalid rows as well."""
    evaluated = evaluation_fragments(config, source) if holdout.test else ()
    chosen = {each.first_id for each in evaluated}
    others = [each for each in source.fragments if each.first_id not in chosen]
    ids = source.sample_ids(evaluated)
    return np.unique(np.concatenate([ids[holdout.is_train(ids)], source.sample_ids(others)]))


def hold_out(config: RunConfig, num_rows: int, *, can_be_evaluated: bool) -> Holdout:
    """Return the split of ``num_rows`` rows, invalid ones included; nothing is held out without an evaluation."""
    settings = config.evaluation
    if settings.every_epochs == 0 or not can_be_evaluated:
        return Holdout(seed=config.seed)
    num_test = settings.num_test if settings.data is None else 0
    return make_split(num_rows, num_test=num_test, num_train=settings.num_train, seed=config.seed)


def known_tokenizer(config: RunConfig, output: Place, *, resumed: bool) -> Tokenizer | None:
    """Return the tokenizer of a resumed run, of the configuration, or of a pretrained model.

    Raises ``ConfigError`` if the configuration names another tokenizer than the pretrained model's own.
    """
    if resumed and (output / TOKENIZER).exists():
        return load_tokenizer((output / TOKENIZER).uri)
    asked = None if config.text.tokenizer is None else load_tokenizer(config.text.tokenizer)
    if not config.has_pretrained_tokenizer:
        return asked
    name = config.encoder_of_texts.name
    own_weights = f"{'text_encoder' if config.data.kind == 'image_text' else 'encoder'}.kwargs.pretrained"
    folder = name.removeprefix(HUGGING_FACE)
    place = Place(folder) / TOKENIZER
    if not place.exists():
        raise ConfigError(
            f"the model in {folder} has no {TOKENIZER} beside it, and its weights require its own "
            f"tokenizer; save its fast tokenizer there, or set {own_weights}=false"
        )
    own = Tokenizer(place.read_text())
    if asked is not None and asked.fingerprint != own.fingerprint:
        raise ConfigError(
            f"text.tokenizer {config.text.tokenizer} is not the one that {name} was trained with; remove "
            f"it, or set {own_weights}=false"
        )
    return own


def check_width(config: RunConfig, teacher_dim: int) -> None:
    """Raise ``ConfigError`` if a stage compares embeddings with a teacher's of another width."""
    dim = config.projection_head.dim
    if dim != teacher_dim and any(stage.teacher_keys for stage in config.stages):
        raise ConfigError(
            f"teacher_keys needs embeddings of one width, and the run has {dim} numbers and its teacher {teacher_dim}; "
            f"set projection_head.dim={teacher_dim}, or remove teacher_keys"
        )


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
