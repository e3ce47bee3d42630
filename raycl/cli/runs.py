"""The commands that use a run: evaluate it, use its encoder, and show or check its files."""

import contextlib
import datetime
import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from raycl.cli.options import Address, Debug, Gpu, NamedRun, Run, Setting, Side, one_run
from raycl.errors import ConfigError

if TYPE_CHECKING:
    from raycl.report.listing import RunSummary

MovedData = Annotated[
    list[str] | None, typer.Option(help="The data of the run, if they have moved; may be repeated.")
]


def evaluate(
    measure: Annotated[str, typer.Argument(help="knn, linear, retrieval or sts.")],
    test: Annotated[str, typer.Option(help="Test set.")],
    run: Run = None,
    named_run: NamedRun = None,
    train: Annotated[
        str | None, typer.Option(help="Labeled training set; further documents; corpus of the baseline.")
    ] = None,
    json_file: Annotated[str | None, typer.Option("--json", help="Write the result to this file.")] = None,
    gpu: Gpu = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Evaluate a run's encoder: kNN, linear probe, retrieval or sentence similarity, next to a baseline."""
    from raycl.cli.plan import check_measure, command_settings

    check_measure(measure)
    run = one_run(run, named_run)
    options: dict[str, Any] = {"gpu": gpu, "address": address, "debug": debug}
    options |= command_settings(measure, settings or [])
    from raycl.api import evaluate as evaluate_run
    from raycl.lease import writing
    from raycl.storage import Place, absolute

    written = None if json_file is None else Place(absolute(json_file))
    with contextlib.nullcontext() if written is None else writing(written, is_file=True) as lease:
        result = evaluate_run(measure, run=run, train=train, test=test, **options)  # pyright: ignore[reportArgumentType]
        text = json.dumps({key: value for key, value in result.items() if key != "examples"})
        print(result if sys.stdout.isatty() else text, flush=True)
        if written is not None and lease is not None:
            lease.check()
            written.write_text(text + "\n")
    for example in result.get("examples", ()):
        _show_example(example)


def embed(
    data: Annotated[str, typer.Option(help="Images or texts to embed.")],
    output: Annotated[str, typer.Option(help="Folder of parquet files to write; local or s3://.")],
    run: Run = None,
    named_run: NamedRun = None,
    side: Side = "query",
    index: Annotated[str | None, typer.Option(help="Search index to write as well: faiss.")] = None,
    gpu: Gpu = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Embed a set of images or texts to parquet, and to a search index."""
    from raycl.cli.plan import command_settings

    run = one_run(run, named_run)
    options: dict[str, Any] = {"side": side, "gpu": gpu, "address": address}
    chosen: dict[str, Any] = {"index": index, **command_settings("embed", settings or [])}
    from raycl.inference.preflight import check_index, check_inputs

    check_index(index)
    check_inputs(run, data=[data], output=output, **options)
    from raycl.inference.embed import embed_to_parquet

    rows = embed_to_parquet(run, data, output, debug=debug, **options, **chosen)
    print(f"{rows.num_rows - rows.num_invalid:,} rows embedded to {output}")
    if rows.num_invalid:
        print(f"invalid rows: {rows.describe_invalid()}")


def mine(
    data: Annotated[str, typer.Option(help="Pairs, optionally with labels or lists of negatives.")],
    output: Annotated[str, typer.Option(help="Parquet file to write: query, document, negatives.")],
    run: Annotated[
        str | None, typer.Argument(help="The --output of a run with two towers, or one for both.")
    ] = None,
    named_run: NamedRun = None,
    num_negatives: Annotated[int, typer.Option(help="Largest number of negatives to add per pair.")] = 8,
    max_relative_score: Annotated[
        float, typer.Option(help="Skip documents whose cosine exceeds this fraction of the positive's.")
    ] = 0.95,
    gpu: Gpu = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Add hard negatives to pairs: the documents nearest to a query that do not match it."""
    from raycl.cli.plan import command_settings

    run = one_run(run, named_run)
    chosen = command_settings("mine", settings or [])
    from raycl.inference.preflight import check_inputs, check_mining

    check_mining(num_negatives, max_relative_score, output)
    check_inputs(run, data=[data], output=output, gpu=gpu, address=address)
    from raycl.inference.mining import mine_negatives

    mined = mine_negatives(
        run, data, output, num_negatives=num_negatives, max_relative_score=max_relative_score, gpu=gpu, address=address, debug=debug, **chosen
    )  # fmt: skip
    print(
        f"{mined.num_negatives:,} negatives added to {mined.num_pairs:,} pairs in {output}; "
        f"{mined.num_too_near:,} were too near, {mined.num_invalid:,} rows are invalid"
    )


def export(
    output: Annotated[str, typer.Option(help="Folder to write; local or s3://.")],
    run: Run = None,
    named_run: NamedRun = None,
    to: Annotated[
        str | None,
        typer.Option(
            help="sentence_transformers or model2vec (texts), torchvision or timm (images), or onnx."
        ),
    ] = None,
    side: Side = "query",
    debug: Debug = False,
) -> None:
    """Write a run's encoder for other packages."""
    from raycl.inference.preflight import check_inputs, check_package

    check_package(to)
    run = one_run(run, named_run)
    options: dict[str, Any] = {"side": side}
    check_inputs(run, output=output, **options)
    from raycl.inference.export import export_encoder

    print(f"load it with {export_encoder(run, output, to=to, **options)}")  # pyright: ignore[reportArgumentType]


def runs(
    folder: Annotated[str, typer.Argument(help="Folder above the runs, up to three levels; local or s3://.")],
    json_file: Annotated[
        str | None, typer.Option("--json", help="File to write the list to as JSON; local or s3://.")
    ] = None,
    debug: Debug = False,
) -> None:
    """List the runs below a folder with their recipe, status, progress and best figure."""
    from raycl.display import text_table
    from raycl.report.listing import list_runs
    from raycl.storage import Place, absolute

    found = list_runs(folder)
    if json_file is not None:
        Place(absolute(json_file)).write_text(json.dumps([vars(each) for each in found]) + "\n")
    if found:
        columns = ("run", "recipe", "status", "step", "epoch", "best", "when")
        print(text_table(columns, [_row(each) for each in found]))
        damaged = [f"{each.name} ({each.num_damaged:,})" for each in found if each.num_damaged]
        if damaged:
            print(f"damaged lines of metrics.jsonl were skipped: {', '.join(damaged)}")
    else:
        print(f"no runs found in {folder} and three levels below")


def report(
    runs: Annotated[
        list[str] | None, typer.Argument(help="The --output of a run; several are compared on one page.")
    ] = None,
    run: Annotated[str | None, typer.Option(help="The --output of a run.")] = None,
    output: Annotated[
        str | None,
        typer.Option(
            help="File to write; default: report.html in the run, or ./comparison.html for several."
        ),
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a report on a run (curves, similarities, neighbors, a map), or a comparison of several."""
    from raycl.api import write_report

    print(write_report([*(runs or []), *([] if run is None else [run])], output))


def replay(
    run: Annotated[str, typer.Argument(help="The --output of a run.")],
    step: Annotated[int | None, typer.Option(help="Step to make again, from 1 on.")] = None,
    find: Annotated[
        str | None,
        typer.Option(help="Find steps instead: max-loss, nan, or sample=ID for those that drew it."),
    ] = None,
    top: Annotated[int, typer.Option(help="Negatives of each query, or steps of --find max-loss.")] = 5,
    json_file: Annotated[
        str | None, typer.Option("--json", help="File to write the result to as JSON; local or s3://.")
    ] = None,
    html: Annotated[str | None, typer.Option(help="Page to write with pictures; local or s3://.")] = None,
    data: MovedData = None,
    debug: Debug = False,
) -> None:
    """Make a step of a run again, and show which negatives pushed each query; needs no Ray."""
    if (step is None) == (find is None):
        raise ConfigError("replay takes exactly one of --step N and --find max-loss|nan|sample=ID")
    if find is not None and html is not None:
        raise ConfigError("--html shows a step; give it with --step N")
    from raycl.api import find_steps
    from raycl.api import replay as replay_step

    if step is None:
        found = find_steps(run, find or "", top=top, data=data)
    else:
        found = replay_step(run, step=step, top=top, data=data, html=html)
    if json_file is not None:
        from raycl.storage import Place, absolute

        Place(absolute(json_file)).write_text(json.dumps(found.to_dict()) + "\n")
    print(found)


def certify(
    run: Annotated[
        str | None, typer.Argument(help="The --output of a run; with --check, by default the file's folder.")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Steps to compute again, chosen at random.", show_default="4")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Certificate to write; default: certificate.json in the run.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="Check this certificate and the files of its run; needs no data.")
    ] = None,
    data: MovedData = None,
    debug: Debug = False,
) -> None:
    """Check a run against its chain of hashes, compute some steps again, and write a certificate; needs no Ray."""
    from raycl.api import certify as certify_run
    from raycl.api import check_certificate

    if check is not None:
        if data or json_file is not None or steps is not None:
            raise ConfigError(
                "--check reads a certificate and the files of its run only; remove --steps, --data and --json"
            )
        found = check_certificate(check, run)
    elif run is None:
        raise ConfigError("certify needs a run: raycl certify RUN, or raycl certify --check FILE")
    else:
        found = certify_run(run, steps=4 if steps is None else steps, data=data)
    print(found)
    if not found.is_valid:
        raise typer.Exit(1)
    if check is None:
        print(f"the certificate is in {found.write(json_file)}")


def _show_example(example: dict[str, Any]) -> None:
    """Print a query and its nearest documents to stderr."""
    from raycl.display import Table

    rows = [
        (
            f"{found['similarity']:.3f}",
            "yes" if found["matches"] else "",
            " ".join(found["document"].split())[:120],
        )
        for found in example["nearest"]
    ]
    title = " ".join(example["query"].split())[:160]
    print(Table(title=title, columns=("cosine", "match", "document"), rows=rows).to_text(), file=sys.stderr)


def _row(run: "RunSummary") -> tuple[str | None, ...]:
    best = None if run.best is None else f"{run.metric} {run.best:.4f}"
    when = f"{datetime.datetime.fromtimestamp(run.time, datetime.UTC):%Y-%m-%d %H:%M} UTC"
    progress = (_of(run.step, run.num_steps), _of(run.epoch, run.num_epochs))
    return run.name, run.recipe, run.status, *progress, best, when


def _of(done: int | None, planned: int | None) -> str | None:
    """Return 1,000/2,000, or 1,000 if the plan is unknown."""
    return None if done is None else f"{done:,}" if planned is None else f"{done:,}/{planned:,}"
