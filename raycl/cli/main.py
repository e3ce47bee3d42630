"""The command line: each command checks its input, calls one function and prints the result."""

import atexit
import contextlib
import gc
import json
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import Annotated, NoReturn

import typer

import raycl
from raycl.cli.bank import bank
from raycl.cli.options import (
    OF_RECIPE,
    Address,
    BatchSize,
    Debug,
    Epochs,
    Gpu,
    Like,
    OneDataSet,
    Seed,
    Setting,
    Steps,
    Workers,
)
from raycl.cli.runs import certify, embed, evaluate, export, mine, replay, report, runs
from raycl.cli.serve import explore
from raycl.errors import ConfigError, DataError, RayclError, StoppedError, StorageError

INTERRUPTED = 128 + signal.SIGINT
_ALLOCATIONS = 50_000  # between garbage collections; with Python's 700 they slow imports by a sixth

app = typer.Typer(
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

app.add_typer(bank, name="bank")


def _print_version(asked: bool) -> None:
    if asked:
        print(f"raycl {raycl.__version__}")
        raise typer.Exit


@app.callback()
def explain(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Contrastive learning that runs on a Ray cluster."""


@app.command()
def demo(
    output: Annotated[str, typer.Option(help="Folder for the images, the run and the figure.")] = "demo",
    workers: Annotated[int, typer.Option(min=1, help="Training processes.")] = 2,
    epochs: Annotated[int, typer.Option(help="Passes over the training digits.")] = 12,
    debug: Debug = False,
) -> None:
    """Pretrain on scikit-learn's handwritten digits, evaluate the encoder, and plot its neighbors."""
    from raycl.demo.digits import plan_demo

    config = plan_demo(output, workers=workers, epochs=epochs)
    from raycl.provenance import typed
    from raycl.ray_runtime import prestart_ray

    prestart_ray(None, debug=debug)
    from raycl.demo.run import run_demo

    with typed(sys.argv):
        run_demo(output, config, debug=debug)


@app.command()
def recipes(
    name: Annotated[str | None, typer.Argument(help="Print this recipe as YAML, with comments.")] = None,
    image_size: Annotated[
        int, typer.Option(help="Image size in pixels; up to 64 selects the small-image values.")
    ] = 224,
    debug: Debug = False,
) -> None:
    """List the recipes, or print one as YAML."""
    from raycl.config.overrides import config_to_yaml
    from raycl.recipes import RECIPES, recipe
    from raycl.recipes.like import LIKE

    if name is not None:
        print(config_to_yaml(recipe(name, image_size=image_size), comments=True), end="")
        return
    for known, build in RECIPES.items():
        print(f"{known:24} {(build.__doc__ or '').splitlines()[0]}")
    for like, (base, _) in LIKE.items():
        print(f"{like:24} {base} with the values of the other library, for --like")


@app.command()
def train(
    *,
    recipe: Annotated[str | None, typer.Argument(help="Recipe name or .yaml file.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="File (parquet, Arrow, tar, CSV, JSONL), folder of them, table (Delta, Iceberg, Lance), or folder of "
            "images; local or s3://. May be repeated: each batch has rows of one data set. Required for a new run."
        ),
    ] = None,
    output: Annotated[str, typer.Option(help="Folder of the run; local or s3://.")],
    like: Like = None,
    workers: Workers = None,
    gpu: Gpu = False,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume", help="Resume from the last checkpoint, by default with the run's settings and data."
        ),
    ] = False,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Pretrain an encoder by contrastive learning."""
    from raycl.cli.plan import own_data, own_settings, plan_run, run_flags
    from raycl.recipes import recipe_like

    flags = run_flags(
        workers=workers, gpu=gpu or None, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed
    )
    if resume and recipe is None and like is None:
        recipe = own_settings(output)
    if resume and not data:
        data = own_data(output)
    if not data:
        raise ConfigError("a new run needs --data, an address of samples")
    config, sources, notes = plan_run(
        recipe_like(recipe, like),
        data=data,
        flags=flags,
        settings=settings or [],
        resumed=output if resume else None,
    )
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
            result = train_validated(run, notes=notes, address=address, debug=debug)
    evaluated = "".join(f", {name} {_metric(value)}" for name, value in result.final.items())
    rate = f"{result.samples_per_second:,.0f} samples/s"
    if config.num_views > 2:
        rate += f", {result.views_per_second:,.0f} views/s"
    print(
        f"{result.steps} steps in {result.seconds:.0f} s ({rate}){evaluated}; the encoder is in {result.output}"
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
def tune(
    recipe: Annotated[str, typer.Argument(help="Recipe name or .yaml file.")],
    data: Annotated[
        list[str], typer.Option(help="As for raycl train; the samples have labels or are pairs.")
    ],
    output: Annotated[
        str, typer.Option(help="Folder of tuned.yaml and the trials; local or s3://.")
    ] = "tuned",
    minutes: Annotated[float, typer.Option(help="Time limit, from start to end.")] = 10.0,
    workers: Workers = None,
    gpu: Gpu = False,
    batch_size: BatchSize = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of the runs and the search.", show_default=OF_RECIPE)
    ] = None,
    settings: Setting = None,
    address: Address = None,
    debug: Debug = False,
) -> None:
    """Search for a better learning rate, temperature, crop scale and batch size of a recipe."""
    from raycl.api import tune as tune_recipe

    result = tune_recipe(
        recipe,
        data=data,
        output=output,
        minutes=minutes,
        workers=workers,
        gpu=gpu or None,
        batch_size=batch_size,
        seed=seed,
        settings=settings or [],
        address=address,
        debug=debug,
    )
    print(result)
    named = [part for each in data for part in ("--data", each)]
    print(f"train with them: {shlex.join(['raycl', 'train', result.output, *named])} --output RUN")


for command in (evaluate, embed, mine, export, runs, explore, report, replay, certify):
    app.command(cls=OneDataSet)(command)


@app.command(cls=OneDataSet)
def doctor(
    recipe: Annotated[str | None, typer.Argument(help="Recipe name or .yaml file to check.")] = None,
    data: Annotated[str | None, typer.Option(help="Data set to check; local or s3://.")] = None,
    output: Annotated[
        str | None, typer.Option(help="Folder that every node must be able to write to; local or s3://.")
    ] = None,
    like: Like = None,
    workers: Workers = None,
    gpu: Gpu = False,
    epochs: Epochs = None,
    steps: Steps = None,
    batch_size: BatchSize = None,
    seed: Seed = None,
    settings: Setting = None,
    address: Address = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    debug: Debug = False,
) -> None:
    """Check the cluster, the storage, the data and the recipe; print one line per check, with a remedy."""
    from raycl.api import examine
    from raycl.cli.plan import run_flags
    from raycl.recipes import recipe_like

    flags = run_flags(
        workers=workers, gpu=gpu or None, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed
    )
    if like is not None:
        recipe = recipe_like(recipe, like)
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
    job.command(cls=OneDataSet)(command)
    _run(job)


def _run(command: typer.Typer) -> NoReturn:
    """Turn errors into one line and an exit status."""
    gc.set_threshold(_ALLOCATIONS)
    atexit.register(_skip_last_collection)
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


def _skip_last_collection() -> None:
    """Skip the search of all modules for cycles at exit, which takes most of a second.

    Not with triton, which would list its objects as leaked: the exports to ONNX and Hugging Face's models import it.
    """
    if "triton" not in sys.modules:
        gc.freeze()


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


def _metric(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:.4f}"


def _status_of(error: RayclError) -> int:
    if isinstance(error, StoppedError):
        return 128 + error.signum
    return 2 if isinstance(error, ConfigError | DataError | StorageError) else 1


def _print_error(text: str) -> None:
    """Print an error as one line, also if a library's message has several."""
    print(f"raycl: {' '.join(text.split())[:1_000]}", file=sys.stderr)
