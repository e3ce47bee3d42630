"""Snapshots of a bank: a parquet file for each shard, and the file that names the current snapshot.

The folder ``<output>/bank`` has a folder ``step-XXXXXXXX`` for each snapshot, and ``current.json``,
which names the current snapshot. It is written when all shards have saved theirs, and again when a
run restores an earlier one.

A shard of a memory bank writes an increment, the rows written since the current snapshot, or a base, all rows.
Its rows are the rows of a base and of the increments after it: a ``Chain`` of files. The snapshot's ``needs.json``
lists the steps in the chains of all shards, which pruning must keep.
"""

import contextlib
import json
import re
import socket
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from raycl.errors import ConfigError, RunError, StorageError, first_line
from raycl.lease import is_claim
from raycl.negatives.queue import KeyQueue
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives, State, concatenate
from raycl.storage import Place, check_plain, is_unreachable

# Rows are written and read in groups of this many, so that a snapshot takes little memory.
ROWS_PER_GROUP = 65_536

# The increments after a base have at most this share of a shard's rows, and this many files.
INCREMENT_SHARE, MAX_INCREMENTS = 0.5, 256

_STEP = re.compile(r"step-[0-9]{8,}")
_SHARD_FILE = re.compile(r"shard-0-of-([0-9]+)\.parquet")

# A snapshot fits a bank if these agree; the values are the settings to name in an error.
_SHAPE = {
    "kind": "negatives.store",
    "num_shards": "bank.shards",
    "capacity": "negatives.capacity, or the data,",
    "dim": "projection_head.dim",
    "dtype": "bank.dtype",
}


def snapshot_folder(spec: BankSpec, step: int) -> Place:
    """Return the folder of a step's snapshot."""
    return spec.place / f"step-{step:08d}"


def shard_place(spec: BankSpec, shard: int, step: int) -> Place:
    """Return the file of a shard in the snapshot of a step."""
    return snapshot_folder(spec, step) / f"shard-{shard}-of-{spec.num_shards}.parquet"


@final
@dataclass(frozen=True)
class Current:
    """The step of the current snapshot (0: none), and the number of the current attempt.

    ``attempt`` rises with each ``restore``, so that calls of an earlier worker group are refused.
    """

    step: int = 0
    attempt: int = 0


@final
@dataclass(frozen=True)
class Chain:
    """The files of one shard's snapshot: the base and its increments."""

    steps: tuple[int, ...] = ()  # of the files, the base first; empty before the first snapshot
    id: str = ""  # of the last file: a file that replaces it has another
    num_rows: int = 0  # of the increments

    def extended(self, step: int, *, num_unsaved: int, num_rows: int) -> "Chain":
        """Return the chain of the next snapshot of a shard of ``num_rows``; a base if the increments would be too many.

        Raises ``ConfigError`` for a step whose file the chain needs.
        """
        if step in self.steps[:-1]:
            raise ConfigError(
                f"the bank cannot save step {step} again: its current snapshot, of step {self.steps[-1]}, continues "
                "that one; save a later step, or restore an earlier one first"
            )
        new, increments = uuid.uuid4().hex, self.num_rows + num_unsaved
        is_short = len(self.steps) <= MAX_INCREMENTS and increments <= INCREMENT_SHARE * num_rows
        # A snapshot that is saved again replaces its own file.
        if step in self.steps or not self.steps or not is_short:
            return Chain((step,), new)
        return Chain((*self.steps, step), new, increments)

    def metadata(self, before: "Chain") -> dict[str, str]:
        """Return the metadata of the last file, given the chain before it."""
        own = {"id": self.id, "increment_rows": str(self.num_rows)}
        if len(self.steps) == 1:
            return own
        return own | {"after_step": str(before.steps[-1]), "after_id": before.id}


def check_visible(spec: BankSpec) -> None:
    """Raise ``RunError`` on a node that does not have the folder of the run."""
    output = Place(spec.output)
    if output.is_local and not output.is_folder():
        raise _invisible(spec, output)


def check_claimed(spec: BankSpec, output: Place) -> None:
    """Raise ``RunError`` on a node that does not see the claim of the process that writes to a folder."""
    if not any(map(is_claim, output.written_at())):
        raise _invisible(spec, output)


def _invisible(spec: BankSpec, output: Place) -> RunError:
    return RunError(
        f"a shard of the bank {spec.name!r} runs on the node {socket.gethostname()}, which does not see the files in "
        f"{output}; give a folder that all nodes share, or s3://BUCKET/PREFIX, as --output"
    )


def read_current(spec: BankSpec) -> Current:
    """Return the current snapshot; raises ``StorageError``."""
    place = spec.place / "current.json"
    if not place.exists():
        return Current()
    try:
        current = Current(**json.loads(place.read_text()))
        if all(type(number) is int and number >= 0 for number in (current.step, current.attempt)):
            return current
    except (ValueError, TypeError, RecursionError):
        pass
    raise StorageError(
        f"{place} does not name a snapshot and an attempt; restore it from a copy, or begin a new run "
        "with another --output"
    )


def write_current(spec: BankSpec, current: Current) -> None:
    """Make a snapshot the current one; raises ``StorageError``."""
    (spec.place / "current.json").write_text(json.dumps(asdict(current)) + "\n")


def snapshot_steps(spec: BankSpec) -> list[int]:
    """Return the steps that have a snapshot, complete or not, in order."""
    if not spec.place.is_folder():
        return []
    folders = {path.split("/")[0] for path, _ in spec.place.files()}
    return sorted(int(name.removeprefix("step-")) for name in folders if _STEP.fullmatch(name))


def prune_snapshots(spec: BankSpec, keep_steps: list[int]) -> None:
    """Delete the snapshots of all other steps, but never the current one, nor those that the kept ones need."""
    kept = {*keep_steps, read_current(spec).step}
    for step in set(snapshot_steps(spec)).difference(*(_read_needs(spec, step) for step in kept)):
        snapshot_folder(spec, step).remove()


def write_needs(spec: BankSpec, step: int, steps: Iterable[int]) -> None:
    """Write the steps whose files the snapshot of a step needs; raises ``StorageError``."""
    (snapshot_folder(spec, step) / "needs.json").write_text(json.dumps(sorted(steps)) + "\n")


def _read_needs(spec: BankSpec, step: int) -> set[int]:
    """Return the steps whose files the snapshot of a step needs; raises ``StorageError``."""
    place = snapshot_folder(spec, step) / "needs.json"
    if not place.exists():  # a snapshot of raycl 0.1.0
        return {step}
    try:
        return {step, *map(int, json.loads(place.read_text()))}
    except (ValueError, TypeError, RecursionError):
        raise StorageError(f"{place} does not list the steps of snapshots; restore it from a copy") from None


def shape_metadata(spec: BankSpec, shard: int) -> dict[str, str]:
    """Return the metadata of a shard's snapshot that follow from the specification."""
    names = ("kind", "num_shards", "capacity", "dim", "dtype", "seed", "momentum")
    values = {name: getattr(spec, name) for name in names}
    values |= {"shard": shard, "first_slot": spec.first_slots[shard]}
    return {name: str(value) for name, value in values.items()}


def write_rows(
    place: Place, rows: Negatives, metadata: Mapping[str, str], *, chosen: np.ndarray | None = None
) -> None:
    """Write rows, or those at the ``chosen`` positions [n], as a parquet file, atomically; raises ``StorageError``.

    Columns: ``sample_id`` and ``step``, int64, and ``embedding``, a list of dim float32 or float16.
    """
    element = pa.from_numpy_dtype(rows.rows.dtype)
    schema = pa.schema(
        {"sample_id": pa.int64(), "step": pa.int64(), "embedding": pa.list_(element, rows.rows.shape[1])},
        metadata=dict(metadata),
    )
    with (
        place.create() as sink,
        pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False) as writer,
    ):
        for start in range(0, len(rows if chosen is None else chosen), ROWS_PER_GROUP):
            group = slice(start, start + ROWS_PER_GROUP)
            writer.write_table(_table(rows[group if chosen is None else chosen[group]], schema))


def read_metadata(spec: BankSpec, shard: int, step: int) -> dict[str, str]:
    """Return the metadata of a shard's snapshot.

    Raises ``StorageError`` if there is no such snapshot, ``ConfigError`` for one of another bank.
    """
    folder, place = snapshot_folder(spec, step), shard_place(spec, shard, step)
    if not place.exists():
        _refuse_missing(spec, folder)
    with _open(place) as file:
        found = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
    expected = shape_metadata(spec, shard)
    for name, setting in _SHAPE.items():
        if found.get(name) != expected[name]:
            raise ConfigError(
                f"the snapshot {folder} is of another bank: its {name} is {found.get(name)}, this one's is "
                f"{expected[name]}; set {setting} as it was, or begin a new run with another --output"
            )
    return found


def read_chain(spec: BankSpec, shard: int, step: int) -> tuple[dict[str, str], Chain]:
    """Return the metadata of a shard's snapshot and its chain.

    Raises what ``read_metadata`` raises, and ``StorageError`` for an increment whose chain is broken.
    """
    found = newest = read_metadata(spec, shard, step)
    steps = [step]
    while "after_step" in found:
        after, after_id = int(found["after_step"]), found["after_id"]
        found = read_metadata(spec, shard, after)
        if after in steps or found.get("id", "") != after_id:
            raise StorageError(
                f"the snapshot {snapshot_folder(spec, step)} continues one of step {after} that was replaced; "
                "restore the folder from a copy, or begin a new run with another --output"
            )
        steps.append(after)
    num_rows = int(newest.get("increment_rows", 0))
    return newest, Chain(tuple(reversed(steps)), newest.get("id", ""), num_rows)


def read_parts(spec: BankSpec, shard: int, step: int) -> Iterator[Negatives]:
    """Yield the rows of the file of a shard and step, in the order of slots; raises ``StorageError``."""
    with _open(shard_place(spec, shard, step)) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group).combine_chunks()
            flat = table["embedding"].combine_chunks().flatten().to_numpy()
            yield Negatives(
                flat.reshape(-1, spec.dim), table["sample_id"].to_numpy(), table["step"].to_numpy()
            )


def read_queue(spec: BankSpec, step: int) -> State:
    """Return the state of a queue from its snapshot; raises what ``read_metadata`` raises."""
    folder = snapshot_folder(spec, step)
    if _num_shards_in(folder) > 1:
        raise ConfigError(
            f"the snapshot {folder} is of a queue with several shards, which only raycl 0.1.0 reads; "
            "begin a new run with another --output"
        )
    sequence = int(read_metadata(spec, 0, step)["sequence"])
    empty = KeyQueue(spec.capacity, spec.dim, spec.row_dtype).negatives()
    rows = concatenate([empty, *read_parts(spec, 0, step)])
    return {**vars(rows), "sequence": sequence, "capacity": spec.capacity}


def saved_spec(output: str) -> BankSpec | None:
    """Return the specification of the bank in an output's current snapshot, None if there is none.

    Raises ``StorageError``, and ``ConfigError`` for a snapshot of raycl 0.1.0.
    """
    named = BankSpec(name=Place(output).name, kind="queue", dim=1, capacity=1, output=output)
    step = read_current(named).step
    num_shards = _num_shards_in(snapshot_folder(named, step))
    if not num_shards:
        return None
    file = f"shard-0-of-{num_shards}.parquet"
    with _open(snapshot_folder(named, step) / file) as opened:
        found = {key.decode(): value.decode() for key, value in (opened.schema_arrow.metadata or {}).items()}
    try:
        sizes = {name: int(found[name]) for name in ("dim", "capacity", "num_shards", "seed")}
        return replace(
            named, kind=found["kind"], dtype=found["dtype"], **sizes, momentum=float(found["momentum"])
        )
    except (KeyError, ValueError) as error:
        raise StorageError(
            f"{snapshot_folder(named, step) / file} lacks the metadata of a snapshot"
        ) from error


def write_samples(spec: BankSpec, sample_id: np.ndarray) -> None:
    """Write the sorted ids of a memory bank's samples, a file for each shard; raises ``StorageError``."""
    for shard in range(spec.num_shards):
        first, stop = spec.first_slots[shard : shard + 2]
        with _samples_place(spec, shard).create() as sink:
            pq.write_table(pa.table({"sample_id": sample_id[first:stop]}), sink)


def read_samples(spec: BankSpec, shard: int) -> np.ndarray:
    """Return the ids of a shard's samples, int64; raises ``StorageError``."""
    with _open(_samples_place(spec, shard)) as file:
        return file.read()["sample_id"].to_numpy()


def _samples_place(spec: BankSpec, shard: int) -> Place:
    return spec.place / "samples" / f"shard-{shard}-of-{spec.num_shards}.parquet"


def _num_shards_in(folder: Place) -> int:
    """Return the number of shards that a snapshot has; 0 if there is none."""
    names = [name for name, _ in folder.files()] if folder.is_folder() else []
    found = [int(match[1]) for name in names if (match := _SHARD_FILE.fullmatch(name))]
    return min(found, default=0)


def _table(rows: Negatives, schema: pa.Schema) -> pa.Table:
    # A flat array and a list length: Arrow uses the rows without a copy.
    embedding = pa.FixedSizeListArray.from_arrays(pa.array(rows.rows.reshape(-1)), rows.rows.shape[1])
    return pa.Table.from_arrays([pa.array(rows.sample_id), pa.array(rows.step), embedding], schema=schema)


def _refuse_missing(spec: BankSpec, folder: Place) -> None:
    num_shards = _num_shards_in(folder)
    if num_shards not in (0, spec.num_shards):
        raise ConfigError(
            f"the snapshot {folder} is of another bank: its num_shards is {num_shards}, this one's is "
            f"{spec.num_shards}; set bank.shards as it was, or begin a new run with another --output"
        )
    steps = ", ".join(map(str, snapshot_steps(spec))) or "none"
    raise StorageError(
        f"there is no complete snapshot {folder} of the bank; the steps that have one: {steps}; "
        "restore the folder from a copy, or begin a new run with another --output"
    )


@contextlib.contextmanager
def _open(place: Place) -> Iterator[pq.ParquetFile]:
    try:
        with place.open() as source, pq.ParquetFile(source, pre_buffer=not place.is_local) as file:
            check_plain(file.schema_arrow, str(place))
            yield file
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and is_unreachable(error):
            raise place.failure("read", error) from error
        raise StorageError(
            f"cannot read {place}: {first_line(error)}; check the address and that the file is complete"
        ) from error
