"""The command line: each command checks its input, calls one function and prints the result."""

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, Any, NoReturn

import typer

from raycl.cli.bank import bank
from raycl.errors import ConfigError, DataError, RayclError, StoppedError, StorageError

INTERRUPTED = 128 + signal.SIGINT

app = typer.Typer(
    help="Contrastive learning that runs on a Ray cluster.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bank, name="bank")

Setting = Annotated[list[str] | None, typer.Option("--set", help="Replace one setting: key.path=value.")]
Address = Annotated[str | None, typer.Option(help="Ray cluster to join; by default a local one is started.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and Ray's logs.")]
Gpu = Annotated[bool, typer.Option("--gpu", help="Give each worker a GPU.")]
Workers = Annotated[str | None, typer.Option(help="Training processes: N, or MIN:MAX to use as many as fit.")]
BatchSize = Annotated[int | None, typer.Option(help="Rows per step over all workers.")]
Run = Annotated[str, typer.Option(help="The --output of a run.")]
Side = Annotated[str, typer.Option(help="With two towers: query or key.")]


@app.command()
def demo(
    output: Annotated[str, typer.Option(help="Folder for the images, the run and the figure.")] = "demo",
    workers: Annotated[int, typer.Option(help="Training processes.")] = 2,
    epochs: Annotated[int | None, typer.Option(help="Passes over the training digits.")] = None,
    debug: Debug = False,
) -> None:
    """Pretrain on scikit-learn's handwritten digits, evaluate the encoder, and plot its neighbors."""
    from raycl.demo.plan import plan_demo

    plan = plan_demo(output, workers=workers, epochs=epochs)
    from raycl.provenance import typed
    from raycl.ray_runtime import prestart_ray

    prestart_ray(None, debug=debug)
    from raycl.demo.run import run_demo

    with typed(sys.argv):
        run_demo(plan, debug=debug)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe as YAML.")] = None,
    image_size: Annotated[
        int, typer.Option(help="Image size in pixels; up to 64 selects the small-image values.")
    ] = 224,
) -> None:
    """List the recipes, or print one as YAML."""
    from raycl.config.overrides import config_to_yaml
    from raycl.recipes import RECIPES, recipe

    if name is not None:
        print(config_to_yaml(recipe(name, image_size=image_size)), end="")
        return
    for known, build in RECIPES.items():
        print(f"{known:24} {(build.__doc__ or '').splitlines()[0]}")


@app.command()
def train(
    recipe: Annotated[str, typer.Argument(help="Recipe name or .yaml file.")],
    data: Annotated[
        list[str],
        typer.Option(
            help="Parquet file or folder, or folder of images; local or s3://. May be repeated: each batch has "
            "rows of one data set."
        ),
    ],
    output: Annotated[str, typer.Option(help="Folder of the run; local or s3://.")],
    workers: Workers = None,
    gpu: Gpu = False,
    epochs: Annotated[int | None, typer.Option(help="Passes over the data.")] = None,
    steps: Annotated[int | None, typer.Option(help="Optimization steps, instead of epochs.")] = None,
    batch_size: BatchSize = None,
    seed: Annotated[int | None, typer.Option(help="Seed of weights, order and views.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Resume from the last checkpoint.")] = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Pretrain an encoder by contrastive learning."""
    from raycl.cli.plan import plan_run, run_flags

    flags = run_flags(
        workers=workers, gpu=gpu or None, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed
    )
    config, sources = plan_run(recipe, data=data, flags=flags, settings=settings or [])
    from raycl.provenance import typed
    from raycl.report.writer import reported
    from raycl.training.preflight import validate_run

    with validate_run(
        config, output=output, resume=resume, data=data, sources=sources, address=address
    ) as run:
        # All checks above run without loading Ray and torch.
        from raycl.ray_runtime import prestart_ray

        prestart_ray(address, debug=debug)
        from raycl.training.launch import train_validated

        with typed(sys.argv), reported(output):
            result = train_validated(run, address=address, debug=debug)
    judged = "".join(f", {name} {value:.4f}" for name, value in result.final.items())
    rate = f"{result.samples_per_second:,.0f} samples/s"
    if config.num_views > 2:
        rate += f", {result.views_per_second:,.0f} views/s"
    print(
        f"{result.steps} steps in {result.seconds:.0f} s ({rate}){judged}; the encoder is in {result.output}"
    )
    for name, counts in result.data_sets.items():
        print(f"{name}: {counts['rows']:,} rows, {counts['steps']:,} steps")
    if result.invalid_rows:
        causes = ", ".join(f"{count} {cause}" for cause, count in result.invalid_rows.items())
        print(f"invalid rows: {causes}")
    for cause, count in result.skipped.items():
        print(f"skipped: {count:,} {cause}")
    if result.flat_images:
        print(f"flat images: {result.flat_images:,} (all pixels of one value)")


@app.command()
def evaluate(
    measure: Annotated[str, typer.Argument(help="knn, linear, retrieval or sts.")],
    run: Run,
    test: Annotated[str, typer.Option(help="Test set.")],
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
    options: dict[str, Any] = {"gpu": gpu, "address": address, "debug": debug}
    options |= command_settings(measure, settings or [])
    from raycl.api import evaluate as evaluate_run
    from raycl.lease import writing
    from raycl.storage import Place, absolute

    written = None if json_file is None else Place(absolute(json_file))
    with contextlib.nullcontext() if written is None else writing(written, is_file=True) as lease:
        result = evaluate_run(measure, run=run, train=train, test=test, **options)  # pyright: ignore[reportArgumentType]
        text = json.dumps({key: value for key, value in result.items() if key != "examples"})
        print(text, flush=True)
        if written is not None and lease is not None:
            lease.check()
            written.write_text(text + "\n")
    for example in result.get("examples", ()):
        _show_example(example)


@app.command()
def embed(
    run: Run,
    data: Annotated[str, typer.Option(help="Images or texts to embed.")],
    output: Annotated[str, typer.Option(help="Folder of parquet files to write; local or s3://.")],
    side: Side = "query",
    gpu: Gpu = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Embed a set of images or texts to parquet."""
    from raycl.cli.plan import command_settings

    options: dict[str, Any] = {"side": side, "gpu": gpu, "address": address}
    chosen = command_settings("embed", settings or [])
    from raycl.inference.preflight import check_inputs

    check_inputs(run, data=[data], output=output, **options)
    from raycl.inference.embed import embed_to_parquet

    rows = embed_to_parquet(run, data, output, debug=debug, **options, **chosen)
    print(f"{rows.num_rows - rows.num_invalid:,} rows embedded to {output}")
    if rows.num_invalid:
        print(f"invalid rows: {rows.describe_invalid()}")


@app.command()
def mine(
    run: Annotated[str, typer.Option(help="The --output of a run with two towers, or one for both.")],
    data: Annotated[str, typer.Option(help="Pairs, optionally with labels or lists of negatives.")],
    output: Annotated[str, typer.Option(help="Parquet file to write: query, document, negatives.")],
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

    chosen = command_settings("mine", settings or [])
    from raycl.inference.preflight import check_inputs, check_mining

    check_mining(num_negatives, max_relative_score)
    check_inputs(run, data=[data], output=output, gpu=gpu, address=address)
    from raycl.inference.mining import mine_negatives

    mined = mine_negatives(
        run, data, output, num_negatives=num_negatives, max_relative_score=max_relative_score, gpu=gpu, address=address, debug=debug, **chosen
    )  # fmt: skip
    print(
        f"{mined.num_negatives:,} negatives added to {mined.num_pairs:,} pairs in {output}; "
        f"{mined.num_too_near:,} were too near, {mined.num_invalid:,} rows are invalid"
    )


@app.command()
def export(
    run: Run,
    output: Annotated[str, typer.Option(help="Folder to write; local or s3://.")],
    to: Annotated[
        str | None, typer.Option(help="sentence_transformers (texts) or torchvision (images).")
    ] = None,
    side: Side = "query",
    debug: Debug = False,
) -> None:
    """Write a run's encoder for other packages."""
    from raycl.inference.preflight import check_inputs, check_package

    check_package(to)
    options: dict[str, Any] = {"side": side}
    check_inputs(run, output=output, **options)
    from raycl.inference.export import export_encoder

    print(f"load it with {export_encoder(run, output, to=to, **options)}")  # pyright: ignore[reportArgumentType]


@app.command()
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


@app.command()
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
    data: Annotated[
        list[str] | None, typer.Option(help="The data of the run, if they have moved; may be repeated.")
    ] = None,
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


@app.command()
def certify(
    run: Annotated[
        str | None, typer.Argument(help="The --output of a run; with --check, by default the file's folder.")
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps to compute again, chosen at random.")] = 4,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Certificate to write; default: certificate.json in the run.")
    ] = None,
    check: Annotated[
        str | None, typer.Option(help="Check this certificate and the files of its run; needs no data.")
    ] = None,
    data: Annotated[
        list[str] | None, typer.Option(help="The data of the run, if they have moved; may be repeated.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Check a run against its chain of hashes, compute some steps again, and write a certificate; needs no Ray."""
    from raycl.api import certify as certify_run
    from raycl.api import check_certificate

    if check is not None:
        if data or json_file is not None:
            raise ConfigError(
                "--check reads a certificate and the files of its run only; remove --data and --json"
            )
        found = check_certificate(check, run)
    elif run is None:
        raise ConfigError("certify needs a run: raycl certify RUN, or raycl certify --check FILE")
    else:
        found = certify_run(run, steps=steps, data=data)
    print(found)
    if not found.is_valid:
        raise typer.Exit(1)
    if check is None:
        print(f"the certificate is in {found.write(json_file)}")


@app.command()
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name or .yaml file to check.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set to check; local or s3://.")] = None,
    output: Annotated[
        str | None, typer.Option(help="Folder that every node must be able to write to; local or s3://.")
    ] = None,
    workers: Workers = None,
    gpu: Gpu = False,
    batch_size: BatchSize = None,
    settings: Setting = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    debug: Debug = False,
) -> None:
    """Check the cluster, the storage, the data and the recipe; print one line per check, with a remedy."""
    from raycl.api import examine
    from raycl.cli.plan import run_flags

    flags = run_flags(workers=workers, gpu=gpu or None, batch_size=batch_size)
    results = []
    for result in examine(
        recipe, flags, settings=settings or [], data=data, output=output, address=address, debug=debug
    ):
        results.append(result)
        if not as_json:
            print(result, flush=True)
    if as_json:
        print(json.dumps([vars(result) for result in results]))
    if not all(result.good for result in results):
        raise typer.Exit(1)


def main() -> None:
    """Run the command line; exit status 0, 2 for invalid input or configuration, 1 for a failed run."""
    _run(app)


def run_job(command: Callable[..., None] | typer.Typer) -> NoReturn:
    """Run one command as a script, with the same flags, errors and exit statuses as ``raycl``."""
    if isinstance(command, typer.Typer):
        _run(command)
    job = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
    job.command()(command)
    _run(job)


def _run(command: typer.Typer) -> NoReturn:
    """Turn errors into one line and an exit status."""
    # A custom encoder may be in the working directory; it comes last, so that no file there
    # shadows a library.
    sys.path.append(os.getcwd())
    received: list[int] = [signal.SIGINT]
    try:
        with _interruptible(received):
            status = command(sys.argv[1:] or ["--help"], standalone_mode=False) or 0
            if status == INTERRUPTED:  # typer's status for KeyboardInterrupt
                raise KeyboardInterrupt
    except RayclError as error:
        if "--debug" in sys.argv:
            traceback.print_exc()
        status = _status_of(error)
        _print_error(str(error))
    except (KeyboardInterrupt, typer.Abort):
        status, name = 128 + received[-1], signal.Signals(received[-1]).name
        _print_error(f"interrupted by {name}; resume a run of `raycl train` with --resume")
    except Exception as error:
        # typer has no public class for its errors of invalid flags; they have ``format_message``.
        text = getattr(error, "format_message", None)
        if text is None and "--debug" in sys.argv:
            raise
        status = 1 if text is None else 2
        _print_error(f"{text() if text else repr(error)} (see {'--help' if text else '--debug'})")
    raise SystemExit(status)


@contextlib.contextmanager
def _interruptible(received: list[int]) -> Iterator[None]:
    """Let SIGTERM interrupt the block as Ctrl-C does; signals after the block are ignored."""

    def interrupt(signum: int, _: object) -> None:
        received.append(signum)
        raise KeyboardInterrupt

    # Shells start background jobs with Ctrl-C ignored; keep it ignored.
    handled = [
        each for each in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(each) is not signal.SIG_IGN
    ]
    try:
        for each in handled:
            signal.signal(each, interrupt)
        yield
    finally:
        # Not SIG_IGN, which processes that start later would inherit.
        for each in handled:
            signal.signal(each, lambda *_: None)


def _status_of(error: RayclError) -> int:
    if isinstance(error, StoppedError):
        return 128 + error.signum
    return 2 if isinstance(error, ConfigError | DataError | StorageError) else 1


def _print_error(text: str) -> None:
    """Print an error as one line, also if a library's message has several."""
    print(f"raycl: {' '.join(text.split())[:1_000]}", file=sys.stderr)


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
