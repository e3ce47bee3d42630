"""``raycl bank``: questions to a bank while training goes on. Imports wait until they are needed."""

import dataclasses
import io
import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycl.cli.serve import serve
from raycl.cli_joining import Address, Debug, Name, join
from raycl.errors import ConfigError, DataError, RunError
from raycl.lease import writing_new

if TYPE_CHECKING:
    import numpy as np

    from raycl.negatives.bank import Bank
    from raycl.negatives.search import Neighbors
    from raycl.negatives.spec import BankSpec

bank = typer.Typer(
    help="Ask the banks of negatives of runs that go on.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

bank.command()(serve)

LEAST_ID, LARGEST_ID = -(2**63), 2**63 - 1
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


@bank.callback(invoke_without_command=True)
def explain(context: typer.Context) -> None:
    """Ask the banks of negatives of runs that go on."""
    if context.invoked_subcommand is None:
        print(context.get_help())


@bank.command("list")
def list_(address: Address = None, as_json: Json = False, debug: Debug = False) -> None:
    """List the banks: what they are and whose."""
    join(address, debug)
    from raycl.cli.bank_tables import print_plans
    from raycl.negatives.bank import list_banks

    plans = {name: _plan_of(name) for name in list_banks()}
    if as_json:
        _print_json([_described(name, plan) for name, plan in plans.items()])
    elif plans:
        print_plans(plans)
    else:
        print("no bank is here; a run with a queue or a memory bank starts one")


@bank.command()
def stats(name: Name, address: Address = None, as_json: Json = False, debug: Debug = False) -> None:
    """Count and measure: rows, ages, norms, traffic, and where the shards are."""
    found = _connect(name, address, debug).stats()
    if as_json:
        return _print_json(dataclasses.asdict(found))
    from raycl.cli.bank_tables import print_stats

    return print_stats(found)


@bank.command()
def nearest(
    name: Name,
    sample_id: Annotated[
        int | None,
        typer.Option("--id", min=LEAST_ID, max=LARGEST_ID, help="Ask with the newest row of this sample."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(help="Ask with this picture, by the run's last checkpoint; local or s3://.")
    ] = None,
    text: Annotated[
        str | None, typer.Option(help="Ask with this text, by the run's last checkpoint.")
    ] = None,
    vector: Annotated[
        str | None, typer.Option(help="Ask with an embedding: a .npy file or a JSON list; local or s3://.")
    ] = None,
    k: Annotated[int, typer.Option("-k", help="How many neighbors.")] = 10,
    address: Address = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Find the rows of highest cosine to a sample, a picture, a text or an embedding."""
    asked = {"id": sample_id, "image": image, "text": text, "vector": vector}
    query = {kind: value for kind, value in asked.items() if value is not None}
    if len(query) != 1:
        raise ConfigError(
            f"nearest takes one of --id, --image, --text and --vector, came {len(query)}; give one"
        )
    if k < 1:
        raise ConfigError(f"cannot look for {k} neighbors; give -k of at least 1")
    embedding = None if vector is None else _read_vector(vector)
    content = None if image is None else _read_file(image)
    holder = _connect(name, address, debug)
    if content is not None:
        embedding, query["checkpoint"] = _embed(holder.plan.output, image=content)
    if text is not None:
        embedding, query["checkpoint"] = _embed(holder.plan.output, text=text)
    if embedding is None:
        found = holder.nearest_of(query["id"], k)
    else:
        (found,) = holder.nearest(embedding, k)
    _tell_neighbors(name, query, found, as_json=as_json)


@bank.command()
def get(
    name: Name,
    sample_ids: Annotated[
        list[int], typer.Option("--id", min=LEAST_ID, max=LARGEST_ID, help="A sample; may be given again.")
    ],
    address: Address = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Print the rows of samples; a step of -1 (never) is a row that no step has written yet."""
    holder = _connect(name, address, debug)
    import numpy as np

    found = holder.get(np.array(sample_ids, np.int64))
    missing = sorted(set(sample_ids) - set(found.sample_id.tolist()))
    if not len(found):
        raise ConfigError(
            f"the bank {name!r} holds no row of {', '.join(map(str, missing[:5]))} now; ask for other samples"
        )
    if as_json:
        parts = zip(found.sample_id.tolist(), found.step.tolist(), found.rows.tolist(), strict=True)
        rows = [dict(zip(("sample_id", "step", "embedding"), part, strict=True)) for part in parts]
        return _print_json({"bank": name, "rows": rows, "missing": missing})
    from raycl.cli.bank_tables import print_rows

    print_rows(found)
    if missing:
        print(f"not here now: {', '.join(map(str, missing))}")
    return None


@bank.command()
def export(
    name: Name,
    output: Annotated[str, typer.Option(help="Folder of parquet files to write; local or s3://.")],
    address: Address = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Write all rows as parquet, a file a shard: sample_id, step, embedding."""
    with writing_new(output) as place:
        holder = _connect(name, address, debug)
        num_rows = holder.export(place.uri)
        if as_json:
            return _print_json({"bank": name, "rows": num_rows, "output": place.uri})
        return print(f"{num_rows:,} rows of {name} exported to {output}")


def _connect(name: str, address: str | None, debug: bool) -> "Bank":
    join(address, debug)
    from raycl.negatives.bank import connect_bank

    return connect_bank(name)


def _plan_of(name: str) -> "BankSpec | None":
    """Return a bank's plan, None if it does not answer: the others are listed all the same."""
    from raycl.negatives.bank import connect_bank

    try:
        return connect_bank(name).plan
    except (ConfigError, RunError):
        return None


def _described(name: str, plan: "BankSpec | None") -> dict[str, Any]:
    return {"name": name, "answers": plan is not None, **(dataclasses.asdict(plan) if plan else {})}


def _embed(run: str, *, image: bytes | None = None, text: str | None = None) -> tuple["np.ndarray", str]:
    from raycl.inference.checkpoint_encoder import load_tower

    saved = load_tower(run)
    embedding = saved.embed_text(text or "") if image is None else saved.embed_image(image)
    return embedding, saved.checkpoint


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
        raise DataError(f"{uri} holds no embedding; give a .npy file or a JSON list of numbers") from error
    if vector.ndim != 1:
        raise DataError(f"{uri} holds an array of {list(vector.shape)}; give one embedding, [dim]")
    return vector


def _tell_neighbors(name: str, query: dict[str, Any], found: "Neighbors", *, as_json: bool) -> None:
    if as_json:
        parts = zip(found.sample_id.tolist(), found.similarity.tolist(), found.step.tolist(), strict=True)
        rows = [dict(zip(("sample_id", "similarity", "step"), part, strict=True)) for part in parts]
        return _print_json({"bank": name, "query": query, "neighbors": rows})
    from raycl.cli.bank_tables import print_neighbors

    return print_neighbors(found)


def _print_json(value: object) -> None:
    print(json.dumps(value))
