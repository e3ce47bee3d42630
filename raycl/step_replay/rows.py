"""The rows of a run, decoded in this process without Ray."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import final

import numpy as np
import pyarrow as pa

from raycl.data.decode import Decoder, decode_here
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sources import Fragment, RawRows, Source, find_source
from raycl.errors import ConfigError, DataError
from raycl.models.build import load_tokenizer
from raycl.step_replay.record import RecordedRun, check_repeatable
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.data_module import hold_out
from raycl.training.data_set import count_tokens
from raycl.training.job import Job
from raycl.training.preflight import check_pairs, check_sizes, column_names
from raycl.training.transforms import build_formats


@final
@dataclass(frozen=True, kw_only=True)
class RunRows:
    """The job of one process on the rows of a run, and where each row came from, by sample id."""

    run: RecordedRun
    job: Job
    sources: tuple[Source, ...]
    where: dict[int, str]

    def data_sets(self) -> list[InMemoryDataset]:
        """Return the training rows of each data set, sorted by id."""
        return [each.where(self.job.holdout.is_train) for each in self.job.load_rows()[1]]

    def with_counted_tokens(self) -> Job:
        """Return the job with the frequencies of tokens, from which some text encoders start."""
        tokenizer = self.job.tokenizer
        if tokenizer is None:
            return self.job
        columns = self.sources[0].columns
        vocabulary = count_tokens(self.run.config.text, tokenizer, columns, self.sources)
        return replace(self.job, vocabulary=vocabulary)


def read_rows(run: RecordedRun) -> RunRows:
    """Decode all rows of a run.

    Raises ``ConfigError`` if one process cannot repeat its steps, ``DataError`` if the data are missing or other ones.
    """
    check_repeatable(run)
    config = run.config
    sources = [find_source(uri, column_names(config)) for uri in run.data]
    for source in sources:
        check_pairs(config, source.columns)
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
    where: dict[int, str] = {}
    tables = [_decoded(source, run, tokenizer, where) for source in sources]
    holdout = hold_out(config, num_rows, can_be_evaluated=config.has_two_towers or sources[0].has_labels)
    ids = [np.concatenate([each["sample_id"].to_numpy() for each in blocks]) for blocks in tables]
    num_train = tuple(int(holdout.is_train(each).sum()) for each in ids)
    check_sizes(config, {source.uri: count for source, count in zip(sources, num_train, strict=True)})
    train_ids = np.unique(np.concatenate(ids))
    train_ids = train_ids[holdout.is_train(train_ids)]
    has_slots = config.negatives.store in ("memory_bank", "partition")
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


def _with_classes(source: Source, classes: tuple[str, ...]) -> Source:
    if missing := set(source.classes or ()) - set(classes):
        raise DataError(
            f"{source.uri} has the class {min(missing)!r}, which the run has not; give the rows of the run by --data"
        )
    return source.with_classes(classes)


def _decoded(
    source: Source, run: RecordedRun, tokenizer: Tokenizer | None, where: dict[int, str]
) -> tuple[pa.Table, ...]:
    """Decode a source by threads; adds the place of each row to ``where``."""
    decoder = Decoder(formats=build_formats(run.config, tokenizer, source.columns), coordinator=None)

    def noted(batches: Iterator[RawRows]) -> Iterator[RawRows]:
        for rows in batches:
            where.update(zip(rows.sample_id.tolist(), rows.where, strict=True))
            yield rows

    def read(fragment: Fragment) -> Iterator[RawRows]:
        return noted(source.read(fragment))

    return tuple(decode_here(source.fragments, read, decoder))
