"""``raycl bank``: query a bank during training."""

import dataclasses
import io
import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycl.cli.options import BankName, Debug, RunningRay, connect
from raycl.cli.serve import serve
from raycl.display import format_value, text_table
from raycl.errors import ConfigError, DataError, RunError

if TYPE_CHECKING:
    import numpy as np

    from raycl.inference.encoder import Asked
    from raycl.negatives.bank import Bank
    from raycl.negatives.search import Neighbors, SampleRows
    from raycl.negatives.spec import BankSpec
    from raycl.negatives.stats import BankStats

bank = typer.Typer(
    help="Query the banks of running jobs.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bank.command()(serve)

MIN_ID, MAX_ID = -(2**63), 2**63 - 1
_BAR = 40  # characters of the longest bar
_NUM_SHOWN = 4  # values of an embedding
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@bank.callback(invoke_without_command=True)
def explain(context: typer.Context) -> None:
    """Query the banks of running jobs."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bank.command("list")
def list_(address: RunningRay = None, as_json: Json = False, debug: Debug = False) -> None:
    """List the banks with their kind, size and run."""
    connect(address, debug)
    from raycl.negatives.bank import list_banks

    specs = {name: _spec_of(name) for name in list_banks()}
    if as_json:
        _print_json([_described(name, spec) for name, spec in specs.items()])
    elif specs:
        _print_specs(specs)
    else:
        print("no banks found; a run with a queue or a memory bank starts one")


@bank.command()
def stats(name: BankName, address: RunningRay = None, as_json: Json = False, debug: Debug = False) -> None:
    """Show statistics: rows, ages, norms, throughput, and the nodes of the shards."""
    found = _connect(name, address, debug).stats()
    if as_json:
        return _print_json(dataclasses.asdict(found))
    return _print_stats(found)


@bank.command()
def nearest(
    name: BankName,
    sample_id: Annotated[
        int | None,
        typer.Option("--id", min=MIN_ID, max=MAX_ID, help="Query by the newest row of this sample."),
    ] = None,
    image: Annotated[
        str | None,
        typer.Option(help="Query by this image, encoded by the run's last checkpoint; local or s3://."),
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Query by this text, encoded by the run's last checkpoint.")
    ] = None,
    vector: Annotated[
        str | None, typer.Option(help="Query by an embedding: a .npy file or a JSON list; local or s3://.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="Number of neighbors.")] = 10,
    address: RunningRay = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the rows with the highest cosine to a sample, an image, a text or an embedding."""
    asked = {"id": sample_id, "image": image, "text": text, "vector": vector}
    query = {kind: value for kind, value in asked.items() if value is not None}
    if len(query) != 1:
        raise ConfigError(
            f"nearest takes exactly one of --id, --image, --text and --vector, got {len(query)}"
        )
    if k < 1:
        raise ConfigError(f"-k must be at least 1, got {k}")
    embedding = None if vector is None else _read_vector(vector)
    content = text if image is None else _read_file(image)
    target = _connect(name, address, debug)
    if content is not None:
        kind = "image" if text is None else "text"
        embedding, query["checkpoint"] = _embed(target.spec.output, kind, content)
    if embedding is None:
        found = target.nearest_of(query["id"], k)
    else:
        (found,) = target.nearest(embedding, k)
    _print_found(name, query, found, as_json=as_json)


@bank.command()
def get(
    name: BankName,
    sample_ids: Annotated[
        list[int], typer.Option("--id", min=MIN_ID, max=MAX_ID, help="Sample id; repeat for several.")
    ],
    address: RunningRay = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the rows of samples; a row that was never updated has step -1."""
    target = _connect(name, address, debug)
    import numpy as np

    found = target.get(np.array(sample_ids, np.int64))
    missing = sorted(set(sample_ids) - set(found.sample_id.tolist()))
    if not len(found):
        from raycl.negatives.search import why_missing

        raise ConfigError(why_missing(missing, target.spec))
    if as_json:
        # A partition function that no step has written yet is -inf, which JSON does not have.
        values = [[each if math.isfinite(each) else None for each in row] for row in found.rows.tolist()]
        parts = zip(found.sample_id.tolist(), found.step.tolist(), values, strict=True)
        rows = [dict(zip(("sample_id", "step", "embedding"), part, strict=True)) for part in parts]
        shown = {"bank": name, "newest_step": found.newest_step, "rows": rows, "missing": missing}
        return _print_json(shown)
    _print_rows(found)
    print(f"newest step: {found.newest_step}")
    if missing:
        print(f"missing: {', '.join(map(str, missing))}")
    return None


@bank.command()
def export(
    name: BankName,
    output: Annotated[str, typer.Option(help="Folder of parquet files to write; local or s3://.")],
    address: RunningRay = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write all rows as parquet files: sample_id, step, embedding."""
    from raycl.lease import check_absent
    from raycl.storage import Place, absolute

    check_absent(output)
    num_rows = _connect(name, address, debug).export(output)
    if as_json:
        return _print_json({"bank": name, "rows": num_rows, "output": Place(absolute(output)).uri})
    return print(f"{num_rows:,} rows of {name} exported to {output}")


def _connect(name: str, address: str | None, debug: bool) -> "Bank":
    connect(address, debug, bank=name)
    from raycl.negatives.bank import connect_bank

    return connect_bank(name)


def _spec_of(name: str) -> "BankSpec | None":
    """Return a bank's specification; None if it does not answer."""
    from raycl.negatives.bank import connect_bank

    try:
        return connect_bank(name).spec
    except (ConfigError, RunError):
        return None


def _described(name: str, spec: "BankSpec | None") -> dict[str, Any]:
    return {"name": name, "answers": spec is not None, **(dataclasses.asdict(spec) if spec else {})}


def _embed(run: str, kind: "Asked", content: bytes | str) -> tuple["np.ndarray", str]:
    from raycl.inference.encoder import load_checkpoint_encoder

    saved = load_checkpoint_encoder(run, asked=kind)
    return saved.embed(kind, content), saved.checkpoint


def _read_file(uri: str) -> bytes:
    from raycl.storage import Place, absolute

    return Place(absolute(uri)).read_bytes()


def _read_vector(uri: str) -> "np.ndarray":
    import numpy as np

    content = _read_file(uri)
    try:
        is_numpy = content.startswith(b"\x93NUMPY")
        vector = np.load(io.BytesIO(content)) if is_numpy else np.array(json.loads(content), np.float64)
    except (ValueError, TypeError, OverflowError) as error:
        raise DataError(
            f"{uri} does not contain an embedding; give a .npy file or a JSON list of numbers"
        ) from error
    if vector.ndim != 1:
        raise DataError(f"{uri} contains an array of shape {list(vector.shape)}; give one embedding, [dim]")
    return vector


def _print_found(name: str, query: dict[str, Any], found: "Neighbors", *, as_json: bool) -> None:
    if as_json:
        parts = zip(found.sample_id.tolist(), found.similarity.tolist(), found.step.tolist(), strict=True)
        rows = [dict(zip(("sample_id", "similarity", "step"), part, strict=True)) for part in parts]
        shown = {"bank": name, "query": query, "newest_step": found.newest_step, "neighbors": rows}
        return _print_json(shown)
    table = found.to_table()
    print(text_table(table.columns, table.rows))
    return print(f"newest step: {found.newest_step}")


def _print_specs(specs: "Mapping[str, BankSpec | None]") -> None:
    """Print one line per bank: kind, size and run."""
    rows = [
        (name, each.kind, str(each.capacity), str(each.dim), each.dtype, str(each.num_shards), each.output)
        if each
        else (name, "does not answer", *[""] * 5)
        for name, each in specs.items()
    ]
    print(text_table(("bank", "kind", "rows", "dim", "dtype", "shards", "run"), rows))


def _print_stats(stats: "BankStats") -> None:
    """Print a bank's statistics, its shards and a histogram of the rows' ages."""
    table = stats.to_table()
    facts = {"bank": stats.name, **{name: format_value(value) for name, value in table.facts.items()}}
    print(text_table((), list(facts.items())))
    print(text_table(table.columns, table.rows))
    if stats.age_histogram:
        most = max(rows for _, rows in stats.age_histogram)
        ages = [
            (f"below {bound:,}", rows, "#" * -(-_BAR * rows // most)) for bound, rows in stats.age_histogram
        ]
        print(text_table(("age in steps", "rows", ""), ages))


def _print_rows(found: "SampleRows") -> None:
    """Print one line per row: sample, step, norm and the first values."""
    from raycl.negatives.search import norms

    rows = [
        (
            str(id_),
            str(step) if step >= 0 else "never",
            f"{length:.4f}",
            " ".join(f"{value:.4f}" for value in row[:_NUM_SHOWN])
            + (" ..." if len(row) > _NUM_SHOWN else ""),
        )
        for id_, step, length, row in zip(
            found.sample_id, found.step, norms(found.rows), found.rows, strict=True
        )
    ]
    print(text_table(("sample_id", "step", "norm", "embedding"), rows))


def _print_json(value: object) -> None:
    print(json.dumps(value, allow_nan=False))
