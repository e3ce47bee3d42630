"""Values at hand in this process: read from a small set, and embedded by Ray Data."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.cluster import fetch_tables, join_cluster, own_errors
from raycl.data.columns import ColumnNames
from raycl.data.decode import Decoder, decode_dataset
from raycl.data.logbook import open_logbook, rows_in
from raycl.data.sources import find_source
from raycl.errors import DataError
from raycl.inference.embedding import SideName, embed_dataset, formats_of
from raycl.models.saved import ImageEncoder, load_encoder
from raycl.progress import ProgressLine, rows_read
from raycl.tokens import BrokenTextError, read_text

BLOCK_ROWS = 4_096
TEXTS = ("text", "caption", "query", "document")


@final
@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a set by role, and labels [num_rows]: -1 where there is none.

    Rows with a broken text, or without a label where there is a column of labels, are left out:
    ``num_broken`` of them.
    """

    by_role: dict[str, list[Any]]
    label: NDArray[np.int64]
    num_broken: int = 0

    @property
    def has_labels(self) -> bool:
        """Whether any row has a label."""
        return bool((self.label >= 0).any())


def read_values(uri: str, columns: ColumnNames, *, keep_broken: bool = False) -> Values:
    """Read the columns of a set, texts as strings; raises ``DataError`` if one is missing.

    ``keep_broken`` keeps rows with a broken text, as None in its place.
    """
    source = find_source(uri, columns)
    by_role: dict[str, list[Any]] = {role: [] for role in source.columns.contents}
    labels = [np.empty(0, np.int64)]
    for piece in source.pieces:
        for rows in source.read(piece):
            for role, values in rows.values.items():
                by_role[role] += map(_as_text, values) if role in TEXTS else _plain(role, values)
            labels.append(_numbers(rows.label, source.classes))
    texts = [values for role, values in by_role.items() if role in TEXTS]
    is_sound = [keep_broken or None not in row for row in zip(*texts, strict=True)] if texts else []
    label = np.concatenate(labels)
    if is_sound and source.columns.label is not None:
        is_sound = [sound and each >= 0 for sound, each in zip(is_sound, label.tolist(), strict=True)]
    if all(is_sound):
        return Values(by_role=by_role, label=label)
    return Values(
        by_role={role: list(compress(values, is_sound)) for role, values in by_role.items()},
        label=label[np.array(is_sound)],
        num_broken=len(is_sound) - sum(is_sound),
    )


def embed_values(
    values: Sequence[Any],
    run: str,
    *,
    side: SideName,
    title: str = "embedding",
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> Tensor:
    """Return the representations [num_values, dim] of texts or encoded images by the encoder of ``run``.

    Raises ``DataError`` for a value that cannot be used.
    """
    encoder = load_encoder(run, side=side)
    role = "image" if isinstance(encoder, ImageEncoder) else "text"
    join_cluster(address, debug=debug)
    kind = pa.binary() if role == "image" else pa.string()
    numbers = np.arange(len(values))
    tables = [
        pa.table(
            {
                role: pa.array(values[start : start + BLOCK_ROWS], kind),
                "sample_id": numbers[start:][:BLOCK_ROWS],
            }
        )
        for start in range(0, len(values), BLOCK_ROWS)
    ]
    columns = ColumnNames(**{"image": None, role: role}, sample_id="sample_id")
    with open_logbook() as logbook:
        decoder = Decoder(formats=formats_of(encoder, role), logbook=logbook)
        with own_errors(), ProgressLine(title, rows_read(logbook, len(values)), quiet=quiet):
            decoded = decode_dataset(ray.data.from_arrow(tables), columns, decoder)
            found = fetch_tables(embed_dataset(decoded, run, role=role, side=side, gpu=gpu))
        rows_in(logbook).check(0.0)
    width = encoder.spec.representation_dim
    order = np.argsort(np.concatenate([table["sample_id"].to_numpy() for table in found]))
    rows = [
        chunk.flatten().to_numpy().reshape(-1, width)
        for table in found
        for chunk in table["representation"].chunks
    ]
    return torch.from_numpy(np.concatenate(rows)[order])


def _as_text(value: Any) -> Any:
    """Return a text, or the sound ones of a list; None if there is none."""
    if isinstance(value, list | tuple):
        return [text for text in map(_as_text, value) if text is not None] or None
    try:
        return read_text(value)
    except BrokenTextError:
        return None


def _plain(role: str, values: list[Any]) -> list[Any]:
    """Return values that need not be there: of negatives the sound texts."""
    return [_as_text(value) or [] for value in values] if role == "negatives" else values


def _numbers(label: NDArray[np.int64], classes: tuple[str, ...] | None) -> NDArray[np.int64]:
    """Return labels as the numbers that they are, also where they were written as text."""
    if classes is None:
        return label
    try:
        written = np.array([int(name) for name in classes], np.int64)
    except ValueError:
        raise DataError(
            f"labels of pairs must be grades such as 0 and 1, came {', '.join(classes[:5])}"
        ) from None
    return np.where(label < 0, label, written[label])
