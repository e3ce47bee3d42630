"""The checks of the rows that a run read, and of the samples that each epoch drew."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import final

import numpy as np
from numpy.typing import NDArray

from raycl.chain import CHAIN, hash_of_draw, read_chain, sha256_of_files
from raycl.data.fingerprint import fingerprint
from raycl.data.in_memory import Batch
from raycl.data.sources import Fragment
from raycl.errors import ConfigError, DataError
from raycl.records import READ_ROWS
from raycl.step_replay.check_history import ChainedHistory, Check, checked
from raycl.step_replay.find import drawn_batches
from raycl.step_replay.record import RecordedRun
from raycl.step_replay.rows import RunRows
from raycl.training.coordinator import RunCoordinator


@final
class DrawnRows:
    """The rows of a run, and how often each epoch drew them."""

    def __init__(self, history: ChainedHistory, rows: RunRows) -> None:
        self._history, self._rows = history, rows
        self.epochs: list[dict[str, int]] = []

    def checks(self) -> Iterator[Check]:
        """Yield the checks of the rows, of the texts of a corpus, and of the samples of each epoch."""
        yield checked("rows", self._check_rows)
        if self._history.run.config.text.corpus is not None:
            yield checked("corpus", self._check_corpus)
        yield checked("samples", self._check_samples)

    def _check_rows(self) -> str:
        if self._history.run.streamed:
            return self._check_streamed_rows()
        found = fingerprint(*(table for tables in self._rows.job.blocks for table in tables))  # pyright: ignore[reportArgumentType]
        for link in self._history.starts:
            if link["rows"] != found:
                raise DataError(
                    f"the run read other rows at step {link['step']:,} than there are now at {', '.join(self._history.run.data)}"
                )
        return f"{sum(map(len, self._rows.where)):,} rows with the contents that the run read"

    def _check_streamed_rows(self) -> str:
        """Compare the fragments with those that the stream read, each as it was read last."""
        read = RunCoordinator()
        read.restore_rows(self._history.run.output / READ_ROWS)
        recorded, found = read.fingerprints(), self._rows.fingerprints
        if not recorded:
            raise ConfigError(f"the run has no {READ_ROWS} with fingerprints of its rows")
        self._check_bound(READ_ROWS)
        places = {each.first_id: each for source in self._rows.sources for each in source.fragments}
        for first, value in recorded.items():
            if found.get(first) != value:
                raise DataError(
                    f"the run read other rows than there are now {_place_of(places.get(first), self._history.run)}"
                )
        return f"{len(recorded):,} of {len(places):,} parts of the stream with the contents that the run read last"

    def _check_bound(self, name: str) -> None:
        """Raise ``ConfigError`` for a file that no link binds; a run that still trains adds links meanwhile."""
        output = self._history.run.output
        found = sha256_of_files(output, (name,))
        if not any(found.items() <= link.get("files", {}).items() for link in read_chain(output)):
            raise ConfigError(
                f"no link of {CHAIN} binds {name}: an older version of raycl wrote it, the run ended while it saved a "
                "checkpoint, or the file was changed"
            )

    def _check_corpus(self) -> str:
        """Compare the texts of ``text.corpus`` with those that each start has read; a resumed run may need none."""
        uri = self._history.run.config.text.corpus
        read = [link for link in self._history.starts if link.get("corpus") is not None]
        if not read:
            raise ConfigError("an older version of raycl made the run, without a fingerprint of text.corpus")
        found = self._rows.corpus_fingerprint()
        for link in read:
            if link["corpus"] != found:
                raise DataError(
                    f"the run read other texts at step {link['step']:,} than there are now at {uri}"
                )
        return f"the texts at {uri} are those that the run read"

    def _check_samples(self) -> str:
        """Compare the samples that the run drew with the order that the seed determines."""
        bound: dict[int, set[int | None]] = {}
        for link in self._history.kept:
            if "drawn" in link:
                bound.setdefault(link["step"], set()).add(link["drawn"])
        step, total, num_train = 0, 0, self._rows.num_train
        last = max(bound, default=0)
        of_epoch: list[Batch] = []
        for position, batch in islice(drawn_batches(self._rows), last):
            if of_epoch and position.epoch_step == 0:
                self.epochs.append(_counted(len(self.epochs), of_epoch, num_train))
                of_epoch = []
            step, total = position.step + 1, (total + hash_of_draw(batch.sample_id, position.epoch)) % 2**64
            of_epoch.append(batch)
            if bound.get(step, {total}) != {total}:
                raise DataError(
                    f"up to step {step:,} the run drew other samples than the order of its seed has: some were skipped, or "
                    "drawn twice"
                )
        if step < last:
            raise DataError(f"the run made {last:,} steps, and its settings have {step:,}")
        if of_epoch:
            self.epochs.append(_counted(len(self.epochs), of_epoch, num_train))
        twice = sum(epoch["drawn_twice"] for epoch in self.epochs)
        # By class, samples in memory are drawn with repetition, and weights may repeat a data set in an epoch.
        data = self._history.run.config.data
        is_once = self._history.run.streamed or (data.samples_per_class is None and data.weights is None)
        if twice and is_once:
            raise DataError(f"{twice:,} samples were drawn twice in an epoch")
        drawn = sum(epoch["drawn"] for epoch in self.epochs)
        return f"{drawn:,} in {len(self.epochs)} epochs of {num_train:,} training samples, {twice:,} twice in an epoch"


def _place_of(fragment: Fragment | None, run: RecordedRun) -> str:
    """Return where a fragment begins, or the addresses of the data if there is none."""
    if fragment is None:
        return f"at {', '.join(run.data)}"
    where = (
        f"{fragment.place}/{fragment.paths[0]}"
        if fragment.paths
        else f"{fragment.place} row {fragment.start}"
    )
    return f"among the {fragment.num_rows:,} rows from {where} on"


def _counted(epoch: int, batches: Sequence[Batch], num_train: int) -> dict[str, int]:
    by_data_set: dict[int, list[NDArray[np.int64]]] = {}  # two data sets may have equal ids
    for batch in batches:
        by_data_set.setdefault(batch.data_set, []).append(batch.sample_id)
    drawn = sum(map(len, batches))
    distinct = sum(len(np.unique(np.concatenate(ids))) for ids in by_data_set.values())
    return {"epoch": epoch, "samples": num_train, "drawn": drawn, "drawn_twice": drawn - distinct}
