"""The rows of a run, decoded in this process without Ray."""

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import final

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from raycl.data.codecs import Formats
from raycl.data.decode import Decoder, decode_here
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sampler import InMemorySampler, MixedSampler
from raycl.data.sources import Fragment, RawRows, Source
from raycl.data.split import Holdout
from raycl.data.streaming import StreamingSampler, fragment_order
from raycl.data.windows import LocalReader
from raycl.errors import ConfigError, DataError
from raycl.gpus import available_cores
from raycl.models.build import load_tokenizer
from raycl.step_replay.record import RecordedRun, check_repeatable
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.coordinator import RunCoordinator
from raycl.training.data_module import evaluation_fragments, fragments_kept_whole, hold_out, streamed_ids
from raycl.training.data_set import read_vocabulary
from raycl.training.job import Job
from raycl.training.preflight import check_pairs, check_sizes, find_corpus, find_sources
from raycl.training.transforms import build_formats
from raycl.training.views import build_sampler


@final
@dataclass(frozen=True, kw_only=True)
class RunRows:
    """The job of one process on the rows of a run, and where each row came from: for each data set, by sample id.

    For a stream, ``fragments`` are the ids and labels of the valid training rows of each fragment, with the tokens if they
    determine the order, ``where`` is empty, and ``fingerprints`` has a fingerprint of each fragment, by its first id.
    """

    run: RecordedRun
    job: Job
    sources: tuple[Source, ...]
    where: tuple[dict[int, str], ...]
    fragments: tuple[pa.Table, ...] = ()
    fingerprints: Mapping[int, int] = field(default_factory=dict)

    @property
    def num_train(self) -> int:
        """The number of valid training rows."""
        return sum(map(len, self.fragments)) if self.run.streamed else sum(self.job.num_train)

    def sampler_of_ids(self) -> InMemorySampler | MixedSampler | StreamingSampler:
        """Return the sampler of the batches of the run, whose batches have ids and labels only."""
        if self.job.stream is None:
            return build_sampler(self.run.config, [each.without_contents() for each in self.data_sets()])
        reader = LocalReader(num_rows=list(map(len, self.fragments)), load=self.fragments.__getitem__)
        return replace(self.job.stream, formats={}, local=reader)

    def data_sets(self) -> list[InMemoryDataset]:
        """Return the training rows of each data set in memory, sorted by id."""
        return [each.where(self.job.holdout.is_train) for each in self.job.load_rows()[1]]

    def train_ids(self) -> NDArray[np.int64]:
        """Return the ids of all training rows."""
        if self.run.streamed:
            return np.concatenate([each["sample_id"].to_numpy() for each in self.fragments])
        return np.concatenate([each.sample_id for each in self.data_sets()])

    def select(
        self, ids: NDArray[np.int64], *, data_set: int = 0
    ) -> tuple[InMemoryDataset, Mapping[int, str]]:
        """Return training rows, at least those with these ids, sorted by id, and where each came from.

        Reads fragments of a stream again.
        """
        if self.job.stream is None:
            return self.data_sets()[data_set], self.where[data_set]
        formats, where = self.job.stream.formats, dict[int, str]()
        read = _fragment_reader(self.run, self.sources[0], formats, self.job.holdout, where)
        is_wanted = partial(np.isin, test_elements=ids)

        def load(number: int) -> pa.Table:
            rows = read(number)
            return rows.filter(pa.array(is_wanted(rows["sample_id"].to_numpy())))

        numbers = [
            number
            for number, rows in enumerate(self.fragments)
            if is_wanted(rows["sample_id"].to_numpy()).any()
        ]
        with ThreadPoolExecutor(available_cores()) as pool:
            tables = list(pool.map(load, numbers))
        return InMemoryDataset(tables, formats).where(is_wanted), where

    def with_counted_tokens(self) -> Job:
        """Return the job with the frequencies of tokens, from which some text encoders start."""
        if self.job.tokenizer is None or not self.run.config.counts_tokens:
            return self.job
        vocabulary, _ = self._read_vocabulary(counted=True)
        return replace(self.job, vocabulary=vocabulary)

    def corpus_fingerprint(self) -> int:
        """Return the fingerprint of the texts of ``text.corpus``, read as the run did."""
        _, found = self._read_vocabulary(counted=False)
        return found

    def _read_vocabulary(self, *, counted: bool) -> tuple[Vocabulary, int]:
        text, corpus, columns = self.run.config.text, find_corpus(self.run.config), self.sources[0].columns
        vocabulary, of_corpus = read_vocabulary(
            text, self.job.tokenizer, columns, self.sources, corpus=corpus, counted=counted
        )
        return vocabulary, of_corpus.fingerprint


def read_rows(run: RecordedRun) -> RunRows:
    """Decode all rows of a run; rows of a stream are decoded again when they are used.

    Raises ``ConfigError`` if one process cannot repeat its steps, ``DataError`` if the data are missing or other ones.
    """
    check_repeatable(run)
    config = run.config
    with _settings_fixed():
        sources = find_sources(config, run.data)
        for source in sources:
            check_pairs(config, source.columns)
    for source in sources:
        if config.data.kind == "pairs" and source.columns.label is not None:
            raise ConfigError(
                "this run cannot be replayed: it grouped a click log with labels; group it once by jobs/prepare.py and "
                "train on that"
            )
    num_rows = sum(source.num_rows for source in sources)
    if num_rows != run.num_rows:
        raise DataError(
            f"the run trained on {run.num_rows:,} rows, and there are {num_rows:,} at {', '.join(run.data)}; "
            "give the rows of the run by --data"
        )
    if run.classes is not None:
        sources = [_with_classes(source, run.classes) for source in sources]
    tokenizer = load_tokenizer(run.output.uri) if config.has_texts else None
    if run.streamed:
        return _streamed(run, sources[0], tokenizer)
    # Two data sets may have equal ids.
    where = tuple(dict[int, str]() for _ in sources)
    tables = [
        _decoded(source, run, tokenizer, of_source) for source, of_source in zip(sources, where, strict=True)
    ]
    holdout = hold_out(config, num_rows, can_be_evaluated=config.has_two_towers or sources[0].has_labels)
    ids = [np.concatenate([each["sample_id"].to_numpy() for each in blocks]) for blocks in tables]
    num_train = tuple(int(holdout.is_train(each).sum()) for each in ids)
    with _settings_fixed():
        check_sizes(config, {source.uri: count for source, count in zip(sources, num_train, strict=True)})
    train_ids = np.unique(np.concatenate(ids))
    train_ids = train_ids[holdout.is_train(train_ids)]
    has_slots = config.negatives.has_slots
    job = Job(
        config=config,
        output=run.output,
        blocks=tuple(tables),
        stream=None,
        num_train=num_train,
        holdout=holdout,
        coordinator=None,
        is_evaluated=False,
        columns=sources[0].columns,
        vocabulary=None if tokenizer is None else Vocabulary(tokenizer),
        sample_id=train_ids if has_slots else None,
        num_samples=len(train_ids) if has_slots else None,
    )
    return RunRows(run=run, job=job, sources=tuple(sources), where=where)


@contextlib.contextmanager
def _settings_fixed() -> Iterator[None]:
    """Replace the advice to change a setting, which replay cannot, by the advice to give the rows of the run."""
    try:
        yield
    except DataError as error:
        cause, remedy, _ = re.split(
            r"([:;] [^:;]*(?:--set|set it lower|lower --batch-size)|$)", str(error), maxsplit=1
        )
        raise DataError(f"{cause}; give the rows of the run by --data") if remedy else error from None


def _streamed(run: RecordedRun, source: Source, tokenizer: Tokenizer | None) -> RunRows:
    """Decode a stream once for the ids of its valid rows; its job decodes the rows of each window again."""
    config, formats = run.config, build_formats(run.config, tokenizer, source.columns)
    can_be_evaluated = config.has_two_towers or source.has_labels
    num_evaluated = sum(fragment.num_rows for fragment in evaluation_fragments(config, source))
    holdout = hold_out(config, num_evaluated, can_be_evaluated=can_be_evaluated)
    counted = RunCoordinator()
    load = _fragment_reader(run, source, formats, holdout, counted=counted)

    def ids_of(number: int) -> pa.Table:
        rows, sorts = load(number), config.text.length_buckets > 1
        is_kept = [name for name in rows.column_names if sorts and name.endswith(".tokens")]
        return rows.select(["sample_id", "label", *is_kept])

    with ThreadPoolExecutor(available_cores()) as pool:
        fragments = tuple(pool.map(ids_of, range(len(source.fragments))))
    num_train = source.num_rows - round(num_evaluated * holdout.test)
    with _settings_fixed():
        check_sizes(config, {source.uri: num_train})
    sample_id = streamed_ids(config, source, holdout) if config.negatives.has_slots else None
    job = Job(
        config=config,
        output=run.output,
        blocks=((),),
        stream=StreamingSampler(
            open_epoch=lambda epoch, _: (fragment_order(source, config.seed, epoch), 0),
            formats=formats,
            seed=config.seed,
            shuffle_buffer_size=config.data.shuffle_buffer_size,
            length_buckets=config.text.length_buckets,
            samples_per_class=config.data.samples_per_class,
            local=LocalReader(num_rows=list(map(len, fragments)), load=load),
        ),
        num_train=(num_train,),
        holdout=holdout,
        coordinator=None,
        is_evaluated=False,
        columns=source.columns,
        vocabulary=None if tokenizer is None else Vocabulary(tokenizer),
        sample_id=sample_id,
        num_samples=None if sample_id is None else len(sample_id),
    )
    return RunRows(
        run=run,
        job=job,
        sources=(source,),
        where=({},),
        fragments=fragments,
        fingerprints=counted.fingerprints(),
    )


def _fragment_reader(
    run: RecordedRun,
    source: Source,
    formats: Formats,
    holdout: Holdout,
    where: dict[int, str] | None = None,
    counted: RunCoordinator | None = None,
) -> Callable[[int], pa.Table]:
    """Return a function that decodes the training rows of a stream's fragment.

    It adds their places to ``where``, and their number and fingerprint to ``counted``.
    """
    kept_whole = fragments_kept_whole(run.config, source)

    def load(number: int) -> pa.Table:
        fragment = source.fragments[number]
        keep = None if fragment.first_id in kept_whole else holdout.is_train
        rows = source.read(fragment)
        decoder = Decoder(formats=formats, coordinator=counted, keep=keep, fingerprints=counted is not None)
        return pa.concat_tables(decoder.tables(fragment.name, rows if where is None else _noted(rows, where)))

    return load


def _noted(batches: Iterator[RawRows], where: dict[int, str]) -> Iterator[RawRows]:
    """Yield rows, and add the place of each to ``where``."""
    for rows in batches:
        where.update(zip(rows.sample_id.tolist(), rows.where, strict=True))
        yield rows


def _with_classes(source: Source, classes: tuple[str, ...]) -> Source:
    if missing := set(source.classes or ()) - set(classes):
        raise DataError(
            f"{source.uri} has the class {min(missing)!r}, which the run has not; give the rows of the run by --data"
        )
    return replace(source, classes=classes)


def _decoded(
    source: Source, run: RecordedRun, tokenizer: Tokenizer | None, where: dict[int, str]
) -> tuple[pa.Table, ...]:
    """Decode a source by threads; adds the place of each row to ``where``."""
    decoder = Decoder(formats=build_formats(run.config, tokenizer, source.columns), coordinator=None)

    def read(fragment: Fragment) -> Iterator[RawRows]:
        return _noted(source.read(fragment), where)

    return tuple(decode_here(source.fragments, read, decoder))
