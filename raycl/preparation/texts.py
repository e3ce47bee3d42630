"""A tokenizer trained on a corpus, and texts that say the same gathered into one row."""

from dataclasses import dataclass
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq

from raycl.cluster import join_cluster
from raycl.config import TextConfig
from raycl.data.columns import ColumnNames
from raycl.data.sources import find_source
from raycl.errors import DataError
from raycl.preparation.output import new_folder
from raycl.storage import Place, absolute
from raycl.tokens import BrokenTextError, Tokenizer, read_text
from raycl.training.vocabulary import count_tokens


def make_tokenizer(
    data: str,
    output: str,
    *,
    columns: ColumnNames,
    vocabulary_size: int = 16_384,
    lowercase: bool = True,
    num_texts: int = 1_000_000,
    address: str | None = None,
    debug: bool = False,
) -> Tokenizer:
    """Train a tokenizer on the texts at ``data``, ``num_texts`` of them at most, and write it to ``output``.

    ``output`` ends in .json; a run takes it by ``text.tokenizer``. Raises ``DataError`` if there is no text.
    """
    source = find_source(data, columns)
    place = new_folder(output)
    place.check_writable()
    join_cluster(address, debug=debug)
    settings = TextConfig(vocabulary_size=vocabulary_size, lowercase=lowercase, num_texts=num_texts)
    tokenizer = count_tokens(settings, None, source.columns, source, None).tokenizer
    place.write_text(tokenizer.to_json())
    return tokenizer


@final
@dataclass(frozen=True, kw_only=True)
class Gathered:
    """How many rows of texts were written, of how many texts, and how many texts were alone or broken."""

    num_rows: int
    num_texts: int
    num_alone: int
    num_broken: int


def gather_texts(data: str, output: str, *, group: str, text: str = "text") -> Gathered:
    """Write one row for each value of the column ``group``: the list of its texts, each once.

    A run of ``simcse`` then takes two texts of a row as two views. Rows without a group, and texts that
    are alone in theirs, are left out. The texts pass through this process. Raises ``DataError`` for a
    column that is missing, or if nothing is left.
    """
    place = new_folder(output)
    found: dict[str, dict[str, None]] = {}
    num_broken = 0
    columns = ColumnNames(image=None, text=text, sample_id=group)
    source = find_source(data, columns)
    for file in {piece.place.uri: piece.place for piece in source.pieces}.values():
        filesystem, path = file.resolve()
        table = pq.read_table(path, columns=[group, text], filesystem=filesystem)
        for name, value in zip(table[group].to_pylist(), table[text].to_pylist(), strict=True):
            if name is None:
                continue
            try:
                found.setdefault(str(name), {})[read_text(value)] = None
            except BrokenTextError:
                num_broken += 1
    rows = [list(texts) for texts in found.values() if len(texts) > 1]
    if not rows:
        raise DataError(
            f"no two texts of {data} share a value of {group!r}; name the right column by --group"
        )
    filesystem, path = Place(absolute(output)).resolve()
    place.check_writable()
    pq.write_table(pa.table({"text": rows}), path, filesystem=filesystem, row_group_size=1_024)
    return Gathered(
        num_rows=len(rows),
        num_texts=sum(map(len, rows)),
        num_alone=len(found) - len(rows),
        num_broken=num_broken,
    )
