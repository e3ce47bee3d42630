"""Values at hand in this process: read from a small set, and embedded by Ray Data."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import compress
from typing import Any, final

import numpy as np
import pyarrow as pa
import ray
import torch
from numpy.typing import NDArray
from torch import Tensor

from raycl.data.columns import ColumnNames
from raycl.data.coordinator import rows_in, start_coordinator
from raycl.data.decode import Decoder, decode_dataset, row_error
from raycl.data.ids import IdFormat
from raycl.data.sources import find_source
from raycl.errors import DataError
from raycl.inference.embed import embed_dataset, formats_of
from raycl.models.encoder_io import ImageEncoder, SavedEncoder
from raycl.progress import ProgressLine, rows_read
from raycl.ray_runtime import connect_cluster, fetch_tables, unwrap_ray_errors
from raycl.tokenization import BrokenTextError, read_text

BLOCK_ROWS = 4_096
TEXTS = ("text", "caption", "query", "document")


@final
@dataclass(frozen=True, kw_only=True)
class Values:
    """The values of a set by role, and labels [num_rows]: -1 where there is none.

    Rows with a broken text, of the negatives too, or without a label where there is a column of labels,
    are left out: ``num_broken`` of them.
    """

    by_role: dict[str, list[Any]]
    label: NDArray[np.int64]
    num_broken: int = 0

    @property
    def has_labels(self) -> bool:
        """Whether any row has a label."""
        return bool((self.label >= 0).any())

    def where(self, is_sound: NDArray[np.bool_], uri: str) -> "Values":
        """Return the rows of ``uri`` that are sound, count the others; raises ``DataError`` if none is."""
        if not is_sound.any():
            raise DataError(
                f"none of the {len(is_sound)} rows of {uri} can be used: texts, labels or ids are missing, "
                "or texts are no UTF-8; mend the data or name other columns with --set data.columns"
            )
        return Values(
            by_role={role: list(compress(values, is_sound)) for role, values in self.by_role.items()},
            label=self.label[is_sound],
            num_broken=self.num_broken + int((~is_sound).sum()),
        )


def read_values(uri: str, columns: ColumnNames, *, keep_broken: bool = False) -> Values:
    """Read the columns of a set, texts as strings.

    ``keep_broken`` keeps all rows, with None in place of a broken text. Raises ``DataError`` if a column
    is missing, or no row can be used.
    """
    source = find_source(uri, columns)
    by_role: dict[str, list[Any]] = {role: [] for role in source.columns.contents}
    labels = [np.empty(0, np.int64)]
    for piece in source.pieces:
        for rows in source.read(piece):
            for role, values in rows.values.items():
                by_role[role] += (_readable(role, value) for value in values)
            labels.append(_numbers(rows.label, source.classes))
    found = Values(by_role=by_role, label=np.concatenate(labels))
    is_sound = np.ones(len(found.label), np.bool_)
    for role in {*TEXTS, "negatives"} & by_role.keys():
        is_sound &= [value is not None for value in by_role[role]]
    if source.columns.label is not None and not keep_broken:
        is_sound &= found.label >= 0
    sound = found.where(is_sound, uri)
    return found if keep_broken else sound


def read_pairs(uri: str, names: ColumnNames) -> Values:
    """Read queries and documents, and where there are any, negatives, labels, and ids as numbers.

    A row with ids that a run cannot use is left out, as it does. Raises ``DataError`` as ``read_values``.
    """
    asked = {"query": names.query or "query", "document": names.document or "document"}
    values = read_values(uri, replace(names, image=None, text=None, caption=None, **asked))
    by_role = values.by_role
    if "negatives" not in by_role:
        by_role.pop("negative_ids", None)
    for role in by_role.keys() & {"query_id", "document_id", "negative_ids"}:
        by_role[role] = IdFormat(in_lists=role == "negative_ids").decode_all(by_role[role])
    is_sound = [row_error(by_role, place) is None for place in range(len(values.label))]
    found = values.where(np.array(is_sound), uri)
    for role in found.by_role.keys() & {"query_id", "document_id"}:
        found.by_role[role] = [number for (number,) in found.by_role[role]]
    return found


def embed_values(
    values: Sequence[Any],
    saved: SavedEncoder,
    *,
    title: str = "embedding",
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> Tensor:
    """Return the representations [num_values, dim] of texts or encoded images by an encoder.

    Raises ``DataError`` for a value that cannot be used.
    """
    encoder = saved.build()
    role = "image" if isinstance(encoder, ImageEncoder) else "text"
    connect_cluster(address, debug=debug, quiet_core=True)
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
    with start_coordinator() as logbook:
        decoder = Decoder(formats=formats_of(encoder, role), logbook=logbook)
        with unwrap_ray_errors(), ProgressLine(title, rows_read(logbook, len(values)), quiet=quiet):
            decoded = decode_dataset(ray.data.from_arrow(tables), columns, decoder)
            found = fetch_tables(embed_dataset(decoded, saved, role=role, gpu=gpu))
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


def _readable(role: str, value: Any) -> Any:
    """Return texts as strings, None for what is broken, and anything else as it is."""
    if role == "negatives":  # there need not be any, but one that is broken breaks the row, as in a run
        texts = [_as_text(text) for text in value or ()]
        return None if None in texts else texts
    return _as_text(value) if role in TEXTS else value


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
