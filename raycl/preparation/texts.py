"""A tokenizer trained on a corpus, and texts that say the same gathered into one row."""

from dataclasses import dataclass
from typing import final

import pyarrow as pa
import pyarrow.parquet as pq

from raycl.config.overrides import override
from raycl.data.columns import ColumnNames
from raycl.data.ids import is_missing, stable_id
from raycl.data.sources import find_source, plain_values
from raycl.errors import DataError
from raycl.lease import writing_new
from raycl.ray_runtime import connect_cluster
from raycl.recipes import recipe
from raycl.tokenization import BrokenTextError, Tokenizer, read_text
from raycl.training.data_module import count_tokens


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

    All ``columns`` are read as texts. ``output`` ends in .json; a run takes it by ``text.tokenizer``. Raises
    ``ConfigError`` for an impossible size, ``DataError`` if there is no text.
    """
    asked = {"vocabulary_size": vocabulary_size, "lowercase": lowercase, "tokenizer_train_size": num_texts}
    settings = override(recipe("simcse"), {f"text.{name}": value for name, value in asked.items()}).text
    source = find_source(data, columns)
    with writing_new(output, is_file=True) as place:
        connect_cluster(address, debug=debug)
        tokenizer = count_tokens(settings, None, columns, source, None).tokenizer
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
    with writing_new(output, is_file=True) as place:
        found: dict[int, dict[str, None]] = {}
        num_broken = 0
        columns = ColumnNames(image=None, text=text, sample_id=group)
        source = find_source(data, columns)
        for file in {piece.place.uri: piece.place for piece in source.pieces}.values():
            with file.explaining("read"), file.open() as source_file:
                table = pq.read_table(source_file, columns=[group, text])
            for name, value in zip(plain_values(table[group]), plain_values(table[text]), strict=True):
                if is_missing(name):
                    continue
                try:
                    found.setdefault(stable_id(name), {})[read_text(value)] = None
                except BrokenTextError:
                    num_broken += 1
        rows = [list(texts) for texts in found.values() if len(texts) > 1]
        if not rows:
            raise DataError(
                f"no two texts of {data} share a value of {group!r}; name the right column by --group"
            )
        filesystem, path = place.resolve()
        pq.write_table(pa.table({"text": rows}), path, filesystem=filesystem, row_group_size=1_024)
        return Gathered(
            num_rows=len(rows),
            num_texts=sum(map(len, rows)),
            num_alone=len(found) - len(rows),
            num_broken=num_broken,
        )
