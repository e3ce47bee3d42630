"""Prepare data once, in a submitted job: ``ray job submit --working-dir . -- python jobs/prepare.py ...``.

``images`` packs a folder of images into parquet files, and ``rows`` tars, CSV or JSONL files; ``tokenizer`` trains a
tokenizer on a corpus, ``pairs`` groups a labeled click log by query, and ``groups`` collects equivalent texts into
lists. Addresses are local paths or s3://.
"""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Annotated

import typer

from raycl.cli.main import run_job
from raycl.cli.options import Address, Debug, OneDataSet, Setting
from raycl.cli.plan import command_settings
from raycl.data.columns import ColumnNames
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError
from raycl.preparation import gather_texts, group_pairs, make_tokenizer, pack_images, pack_rows
from raycl.training.data_set import ROLES

app = typer.Typer(help="Prepare data once for many runs.", add_completion=False)
Data = Annotated[
    str,
    typer.Option(
        help="File (parquet, Arrow, tar, CSV, JSONL), folder of them, table (Delta, Iceberg, Lance), or folder of images."
    ),
]
RowsPerFile = Annotated[int, typer.Option(help="Approximate rows per file.")]
Output = Annotated[str, typer.Option(help="Output address; must not exist.")]


@app.command(cls=OneDataSet)
def images(
    data: Data,
    output: Output,
    rows_per_file: RowsPerFile = 10_000,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Pack a folder of images into parquet files."""
    packed = pack_images(data, output, rows_per_file=rows_per_file, address=address, debug=debug)
    _report_packed(*packed, contents="images", output=output)


@app.command(cls=OneDataSet)
def rows(
    data: Data,
    output: Output,
    columns: Annotated[str, typer.Option(help="Columns: role or role=NAME, comma-separated.")] = "text",
    rows_per_file: RowsPerFile = 10_000,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Pack tars, CSV or JSONL files into parquet files with the same rows and ids."""
    names = _columns(columns, list(vars(ColumnNames())))
    with _naming(**{role: f"--columns {role}=" for role in names.asked}):
        packed = pack_rows(
            data, output, columns=names, rows_per_file=rows_per_file, address=address, debug=debug
        )
    _report_packed(*packed, contents="rows", output=output)


@app.command(cls=OneDataSet)
def tokenizer(
    data: Data,
    output: Output,
    columns: Annotated[str, typer.Option(help="Text columns: role or role=NAME, comma-separated.")] = "text",
    vocabulary_size: Annotated[int, typer.Option(help="Maximum number of tokens.")] = 16_384,
    keep_case: Annotated[bool, typer.Option("--keep-case", help="Distinguish upper and lower case.")] = False,
    num_texts: Annotated[int, typer.Option(help="Maximum number of texts to read.")] = 1_000_000,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Train a tokenizer on the texts of some columns; OUTPUT ends in .json."""
    names = _columns(columns, ROLES, "texts")
    with _naming(**{role: f"--columns {role}=" for role in names.asked}):
        trained, texts = make_tokenizer(
            data,
            output,
            columns=names,
            vocabulary_size=vocabulary_size,
            lowercase=not keep_case,
            num_texts=num_texts,
            address=address,
            debug=debug,
        )
    print(f"{trained.num_tokens:,} tokens in {output}")
    if texts.num_invalid:
        skipped = f"{texts.num_invalid:,} of {texts.num_rows:,} texts are invalid and were skipped"
        print(f"{skipped}: {texts.describe_invalid()}", file=sys.stderr)


@app.command(cls=OneDataSet)
def pairs(
    data: Data,
    output: Output,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Group a labeled click log: one row per positive, with its query's unclicked documents as negatives."""
    found = command_settings("pairs", settings or [])
    columns = found.pop("columns", ColumnNames())
    names = {"image": None, "query": columns.query or "query", "document": columns.document or "document"}
    asked = ColumnNames(**{**vars(columns), **names})
    num_pairs, rows = group_pairs(data, output, columns=asked, address=address, debug=debug, **found)
    print(f"{num_pairs:,} pairs in {output}")
    for cause, count in (rows.skipped | rows.invalid).items():  # pyright: ignore[reportOperatorIssue]
        print(f"skipped: {count:,} {cause}")


@app.command(cls=OneDataSet)
def groups(
    data: Data,
    output: Output,
    group: Annotated[str, typer.Option(help="Column whose equal values mark equivalent texts.")],
    text: Annotated[str, typer.Option(help="Text column.")] = "text",
    debug: Debug = False,
) -> None:
    """Collect equivalent texts into one row, for `raycl train simcse`; OUTPUT ends in .parquet."""
    with _naming(text="--text ", sample_id="--group "):
        found = gather_texts(data, output, group=group, text=text)
    print(f"{found.num_rows:,} rows of {found.num_texts:,} texts in {output}")
    print(
        f"skipped: {found.num_alone:,} texts without a partner, {found.num_without_group:,} without a group; "
        f"invalid: {found.num_invalid:,}"
    )


@contextlib.contextmanager
def _naming(**flags: str) -> Iterator[None]:
    """Name the flag of each role in the refusal of a column, in place of a setting, which this command lacks."""
    try:
        yield
    except DataError as error:
        text = str(error)
        for role, flag in flags.items():
            text = text.replace(f"--set data.columns.{role}=", flag)
        raise DataError(text) from error


def _report_packed(source: Source, stats: ReadStats, *, contents: str, output: str) -> None:
    print(f"{source.num_rows:,} {contents} packed into {output}")
    for line in source.unread():
        print(line)
    if stats.num_invalid:
        unreadable = f"{stats.num_invalid:,} of {stats.num_rows:,} images cannot be read and are null"
        print(f"{unreadable}: {stats.describe_invalid()}", file=sys.stderr)


def _columns(asked: str, known: Sequence[str], contents: str = "columns") -> ColumnNames:
    roles = {role: name or role for role, _, name in (each.partition("=") for each in asked.split(","))}
    for role in roles:
        if role not in known:
            raise ConfigError(
                f"--columns: no {contents} have the role {role!r}; give some of {', '.join(known)}, as role or role=NAME"
            )
    return ColumnNames(**{"image": None, **roles})


if __name__ == "__main__":
    run_job(app)
