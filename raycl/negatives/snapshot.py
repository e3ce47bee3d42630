"""Snapshots of a bank: parquet files that anyone can open, one a shard, and which of them counts.

Below ``<output>/bank`` lie folders ``step-XXXXXXXX``, and the file ``current.json`` that names the
snapshot in force: it is written when all shards have theirs, and again when a run goes back.
"""

import contextlib
import json
import posixpath
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import final

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from raycl.errors import ConfigError, StorageError, first_line
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives
from raycl.storage import Place, check_plain, is_out_of_reach

# Rows are written and read in groups of this many, so that a snapshot takes little memory.
ROWS_A_GROUP = 65_536

_STEP = re.compile(r"step-[0-9]{8,}")

# What must agree for a snapshot to fit a bank, and the setting that says it.
_SHAPE = {
    "kind": "negatives.store",
    "num_shards": "bank.shards",
    "capacity": "negatives.capacity, or the data,",
    "dim": "projection_head.dim",
    "dtype": "bank.dtype",
}


def shard_file(shard: int, num_shards: int, *, first_row: int | None = None) -> str:
    """Return the name of a shard's file in a snapshot, or of its rows from ``first_row`` on in an export."""
    rows = "" if first_row is None else f"-from-{first_row:010d}"
    return f"shard-{shard}-of-{num_shards}{rows}.parquet"


def snapshot_folder(plan: BankSpec, step: int) -> Place:
    """Return where the snapshot of a step lies."""
    return plan.place / f"step-{step:08d}"


@final
@dataclass(frozen=True)
class Current:
    """What a shard comes back with: the snapshot of ``step``, 0 for none, and the attempt under way.

    ``attempt`` tells one group of workers from the next: it rises with each ``restore``.
    """

    step: int = 0
    attempt: int = 0


def read_current(plan: BankSpec) -> Current:
    """Return what is in force; raises ``StorageError``."""
    place = plan.place / "current.json"
    if not place.exists():
        return Current()
    try:
        return _checked(json.loads(place.read_text()))
    except (ValueError, TypeError, RecursionError):
        raise StorageError(
            f"{place} does not name a snapshot and an attempt; put it back from a copy, or begin a new run "
            "with another --output"
        ) from None


def write_current(plan: BankSpec, current: Current) -> None:
    """Put a snapshot in force; raises ``StorageError``."""
    (plan.place / "current.json").write_text(json.dumps(asdict(current)) + "\n")


def snapshot_steps(plan: BankSpec) -> list[int]:
    """Return the steps that have a snapshot, whole or not, in order."""
    if not plan.place.is_folder():
        return []
    folders = {path.split("/")[0] for path, _ in plan.place.files()}
    return sorted(int(name.removeprefix("step-")) for name in folders if _STEP.fullmatch(name))


def prune_snapshots(plan: BankSpec, keep_steps: list[int]) -> None:
    """Delete the snapshots of all other steps, but never the one in force."""
    for step in set(snapshot_steps(plan)) - {*keep_steps, read_current(plan).step}:
        snapshot_folder(plan, step).remove()


def describe(plan: BankSpec, shard: int) -> dict[str, str]:
    """Return the metadata of a shard's snapshot that follow from the plan."""
    first_slot = plan.first_slots[shard] if plan.kind == "memory_bank" else 0
    names = ("kind", "num_shards", "capacity", "dim", "dtype", "seed", "momentum")
    values = {name: getattr(plan, name) for name in names} | {"shard": shard, "first_slot": first_slot}
    return {name: str(value) for name, value in values.items()}


def write_rows(place: Place, rows: Negatives, metadata: Mapping[str, str]) -> int:
    """Write rows as parquet, whole or not at all, and return how many; raises ``StorageError``.

    Columns: ``sample_id`` and ``step``, int64, and ``embedding``, a list of dim float32 or float16.
    """
    element = pa.from_numpy_dtype(rows.rows.dtype)
    schema = pa.schema(
        {"sample_id": pa.int64(), "step": pa.int64(), "embedding": pa.list_(element, rows.rows.shape[1])},
        metadata=dict(metadata),
    )
    with (
        _whole_file(place) as sink,
        pq.ParquetWriter(sink, schema, compression="none", use_dictionary=False) as writer,
    ):
        for start in range(0, len(rows), ROWS_A_GROUP):
            writer.write_table(_table(rows, slice(start, start + ROWS_A_GROUP), schema))
    return len(rows)


def has_snapshot(plan: BankSpec, shard: int, step: int) -> bool:
    """Whether a shard has a snapshot of this step; raises ``StorageError``."""
    return (snapshot_folder(plan, step) / shard_file(shard, plan.num_shards)).exists()


def read_metadata(plan: BankSpec, shard: int, step: int) -> dict[str, str]:
    """Return the metadata of a shard's snapshot.

    Raises:
        StorageError: There is no such snapshot.
        ConfigError: It is of a bank of another shape.
    """
    folder = snapshot_folder(plan, step)
    place = folder / shard_file(shard, plan.num_shards)
    if not place.exists():
        _refuse_missing(plan, folder)
    with _open(place) as file:
        found = {key.decode(): value.decode() for key, value in (file.schema_arrow.metadata or {}).items()}
    for name, setting in _SHAPE.items():
        expected = str(getattr(plan, name))
        if found.get(name) != expected:
            raise ConfigError(
                f"the snapshot {folder} is of another bank: its {name} is {found.get(name)}, this one's is "
                f"{expected}; set {setting} as it was, or begin a new run with another --output"
            )
    return found


def read_parts(plan: BankSpec, shard: int, step: int) -> Iterator[Negatives]:
    """Yield the rows of a shard's snapshot, in the order of slots; raises ``StorageError``."""
    with _open(snapshot_folder(plan, step) / shard_file(shard, plan.num_shards)) as file:
        for group in range(file.num_row_groups):
            table = file.read_row_group(group).combine_chunks()
            flat = table["embedding"].combine_chunks().flatten().to_numpy()
            yield Negatives(
                flat.reshape(-1, plan.dim), table["sample_id"].to_numpy(), table["step"].to_numpy()
            )


def write_samples(plan: BankSpec, sample_id: np.ndarray) -> None:
    """Write the sorted ids of a memory bank's samples, for each shard its own; raises ``StorageError``."""
    for shard in range(plan.num_shards):
        first, stop = plan.first_slots[shard : shard + 2]
        with _whole_file(_samples_place(plan, shard)) as sink:
            pq.write_table(pa.table({"sample_id": sample_id[first:stop]}), sink)


def read_samples(plan: BankSpec, shard: int) -> np.ndarray:
    """Return the ids of a shard's samples, int64; raises ``StorageError``."""
    with _open(_samples_place(plan, shard)) as file:
        return file.read()["sample_id"].to_numpy()


def _checked(found: Mapping[str, int]) -> Current:
    current = Current(**found)
    if not all(type(number) is int and number >= 0 for number in (current.step, current.attempt)):
        raise ValueError
    return current


def _samples_place(plan: BankSpec, shard: int) -> Place:
    return plan.place / "samples" / shard_file(shard, plan.num_shards)


def _table(rows: Negatives, part: slice, schema: pa.Schema) -> pa.Table:
    # Flat numbers with their list length: Arrow takes the rows as they lie, without a copy.
    flat = pa.array(rows.rows[part].reshape(-1))
    embedding = pa.FixedSizeListArray.from_arrays(flat, rows.rows.shape[1])
    return pa.Table.from_arrays(
        [pa.array(rows.sample_id[part]), pa.array(rows.step[part]), embedding], schema=schema
    )


def _refuse_missing(plan: BankSpec, folder: Place) -> None:
    others = (
        {name.rpartition("-of-")[2].removesuffix(".parquet") for name, _ in folder.files()}
        if folder.is_folder()
        else set()
    )
    others -= {str(plan.num_shards)}
    if others:
        raise ConfigError(
            f"the snapshot {folder} is of another bank: its num_shards is {min(others)}, this one's is "
            f"{plan.num_shards}; set bank.shards as it was, or begin a new run with another --output"
        )
    steps = ", ".join(map(str, snapshot_steps(plan))) or "none"
    raise StorageError(
        f"there is no whole snapshot {folder} of the bank; the steps that have one: {steps}; "
        "resume from a checkpoint of one of them"
    )


@contextlib.contextmanager
def _open(place: Place) -> Iterator[pq.ParquetFile]:
    try:
        with place.open() as source, pq.ParquetFile(source, pre_buffer=not place.is_local) as file:
            check_plain(file.schema_arrow, str(place))
            yield file
    except (OSError, pa.ArrowException) as error:
        if isinstance(error, OSError) and is_out_of_reach(error):
            raise place.failure("read", error) from error
        raise StorageError(
            f"cannot read {place}: {first_line(error)}; check the address and that the file is whole"
        ) from error


@contextlib.contextmanager
def _whole_file(place: Place) -> Iterator[pa.NativeFile]:
    """Open a file that appears under its name when it is complete."""
    filesystem, path = place.resolve()
    # An S3 object appears only when its upload is complete.
    partial = path if not place.is_local else _hidden_beside(path)
    try:
        filesystem.create_dir(posixpath.dirname(path), recursive=True)
        try:
            with filesystem.open_output_stream(partial) as sink:
                yield sink
            if partial != path:
                filesystem.move(partial, path)
        except BaseException as error:
            # A failed upload to S3 leaves no object: what has this name is the snapshot from before.
            if partial != path or not isinstance(error, OSError):
                _discard(filesystem, partial)
            raise
    except OSError as error:
        raise place.failure("write", error) from error


def _hidden_beside(path: str) -> str:
    return posixpath.join(posixpath.dirname(path), f".{posixpath.basename(path)}.{uuid.uuid4().hex}")


def _discard(filesystem: fs.FileSystem, path: str) -> None:
    with contextlib.suppress(OSError):
        filesystem.delete_file(path)
