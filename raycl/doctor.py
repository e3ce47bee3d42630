"""The doctor: is this machine, this cluster, this set ready for a run?"""

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

import pyarrow
import ray
import torch

from raycl.cluster import join_cluster, own_errors
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_source
from raycl.data.images import ImageFormat
from raycl.data.logbook import open_logbook, rows_in
from raycl.data.sources import Source, find_source
from raycl.errors import RayclError

NUM_PIECES = 4


@final
@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing looked at: whether it is good, what was seen, and what to do if it is not."""

    good: bool
    name: str
    seen: str
    remedy: str = ""

    def __str__(self) -> str:
        mark = "✓" if self.good else "✗"
        if sys.stdout.isatty():
            mark = f"\033[{32 if self.good else 31}m{mark}\033[0m"
        return f"{mark} {self.name}: {self.seen}" + (f" -> {self.remedy}" if self.remedy else "")


def examine(
    *,
    data: str | None = None,
    columns: ColumnNames | None = None,
    address: str | None = None,
    debug: bool = False,
) -> list[Finding]:
    """Look at versions, the cluster, and ``data`` if given; never raises raycl's own errors."""
    findings = [_versions(), _accelerator()]
    try:
        join_cluster(address, debug=debug)
    except RayclError as error:
        return [*findings, Finding(good=False, name="cluster", seen=str(error))]
    findings += [_cluster(), _object_store()]
    return findings + (list(_data(data, columns)) if data is not None else [])


def _versions() -> Finding:
    seen = f"Python {platform.python_version()}, torch {torch.__version__}, Ray {ray.__version__}, pyarrow {pyarrow.__version__}"
    return Finding(good=True, name="versions", seen=seen)


def _accelerator() -> Finding:
    if torch.cuda.is_available():
        names = ", ".join(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))
        return Finding(good=True, name="accelerator", seen=names)
    return Finding(
        good=True,
        name="accelerator",
        seen="none on this machine; runs use the CPU unless a node of the cluster has one",
    )


def _cluster() -> Finding:
    resources = ray.cluster_resources()
    nodes = sum(node["Alive"] for node in ray.nodes())
    seen = f"{nodes} nodes, {resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
    good = resources.get("CPU", 0) >= 1
    return Finding(good=good, name="cluster", seen=seen, remedy="" if good else "add a node with a CPU")


def _object_store() -> Finding:
    size = ray.cluster_resources().get("object_store_memory", 0) / 2**30
    good = size >= 0.25
    remedy = "" if good else "give Ray more object store memory (at least 0.25 GiB)"
    return Finding(good=good, name="object store", seen=f"{size:.1f} GiB", remedy=remedy)


def _data(uri: str, columns: ColumnNames | None) -> Iterator[Finding]:
    try:
        source = find_source(uri, columns)
    except RayclError as error:
        yield Finding(good=False, name="data", seen=str(error))
        return
    labels = "with labels" if source.has_labels else "without labels (no periodic kNN)"
    yield Finding(good=True, name="data", seen=f"{source.num_rows:,} rows {labels}, {source.kind}")
    if source.ignored:
        ignored = ", ".join(f"{count} {extension}" for extension, count in source.ignored)
        yield Finding(good=True, name="other files", seen=f"ignored: {ignored}")
    yield _sample(source)


def _sample(source: Source) -> Finding:
    """Decode a few pieces spread over the set and count what is broken."""
    step = max(1, len(source.pieces) // NUM_PIECES)
    with open_logbook() as logbook:
        decoder = Decoder(formats={"image": ImageFormat(size=32)}, logbook=logbook)
        try:
            with own_errors():
                decode_source(source, decoder, source.pieces[::step][:NUM_PIECES]).materialize()
        except RayclError as error:
            return Finding(good=False, name="sample", seen=str(error))
        rows = rows_in(logbook)
    seen = f"{rows.num_rows:,} decoded, {rows.num_broken:,} broken"
    if not rows.num_broken:
        return Finding(good=True, name="sample", seen=seen)
    return Finding(
        good=False,
        name="sample",
        seen=f"{seen}: {rows.describe_broken()}",
        remedy="mend them, or raise data.max_bad_fraction",
    )
