"""Malicious files: unpickling one of them creates the marker."""

import io
import os
import pickle
import tarfile
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch


class Malice:
    """An object that runs a command when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self._marker = marker

    def __reduce__(self) -> tuple[Callable[[str], int], tuple[str]]:
        return os.system, (f"touch '{self._marker}'",)


def as_pickle(marker: Path) -> bytes:
    """Return a plain pickle."""
    return pickle.dumps(Malice(marker))


def as_text(marker: Path) -> bytes:
    """Return a pickle that is also valid UTF-8."""
    return pickle.dumps(Malice(marker), protocol=0)


def as_checkpoint(marker: Path) -> bytes:
    """Return a file of ``torch.save``."""
    stream = io.BytesIO()
    torch.save({"learner": {"tower": {"weight": torch.zeros(2)}, "more": Malice(marker)}}, stream)
    return stream.getvalue()


def as_old_checkpoint(marker: Path) -> bytes:
    """Return a file of ``torch.save`` in the format used before zip files."""
    stream = io.BytesIO()
    torch.save({"learner": Malice(marker)}, stream, _use_new_zipfile_serialization=False)
    return stream.getvalue()


def as_tar(marker: Path) -> bytes:
    """Return a tar file of pickles, torch's oldest form."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name in ("sys_info", "pickle", "storages", "tensors"):
            content = pickle.dumps(Malice(marker))
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            archive.addfile(entry, io.BytesIO(content))
    return stream.getvalue()


FORMS: tuple[Callable[[Path], bytes], ...] = (as_pickle, as_text, as_checkpoint, as_old_checkpoint, as_tar)


def pickled_column(marker: Path, num_rows: int) -> pa.Array:
    """Return pickles in the storage type of Ray Data's Python objects."""
    return pa.array([as_pickle(marker)] * num_rows, pa.large_binary())


def write_parquet(
    path: Path, plain: dict[str, pa.Array], name: str, pickled: pa.Array, *, in_list: bool = False
) -> Path:
    """Write columns, one of them marked as Ray Data's extension type."""
    mark = {"ARROW:extension:name": "ray.data.arrow_pickled_object", "ARROW:extension:metadata": ""}
    field = pa.field("item" if in_list else name, pickled.type, metadata=mark)
    fields = [pa.field(each, column.type) for each, column in plain.items()]
    if in_list:
        kind = pa.list_(field)
        offsets = pa.array(range(len(pickled) + 1), pa.int32())
        pickled, field = pa.ListArray.from_arrays(offsets, pickled, type=kind), pa.field(name, kind)
    pq.write_table(pa.Table.from_arrays([*plain.values(), pickled], schema=pa.schema([*fields, field])), path)
    return path
