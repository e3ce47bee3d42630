"""The commands as functions, with the same options; results are returned instead of printed."""

import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from raycl.arguments import Address, as_address, as_addresses, check_type, listed, optional_address
from raycl.cli.plan import (
    Settings,
    check_measure,
    command_settings,
    own_data,
    own_settings,
    plan_run,
    run_flags,
)
from raycl.config import RunConfig
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.preflight import check_inputs, check_options
from raycl.recipes import recipe_like
from raycl.records import find_run

if TYPE_CHECKING:
    import ray
    from torch import nn

    from raycl.display import EvaluationResult
    from raycl.doctor.run import CheckResult
    from raycl.step_replay.certificate import Certificate
    from raycl.step_replay.find import FoundSteps
    from raycl.step_replay.step import ReplayedStep
    from raycl.training.launch import RunResult
    from raycl.tuning.search import TuneResult

Measure = Literal["knn", "linear", "retrieval", "sts"]


def train(
    recipe: Address | RunConfig | None = None,
    *,
    output: Address,
    like: str | None = None,
    data: Address | Sequence[Address] | None = None,
    dataset: "ray.data.Dataset | Sequence[ray.data.Dataset] | None" = None,
    encoder: "nn.Module | None" = None,
    workers: int | str | None = None,
    gpu: bool | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    settings: Settings = (),
    resume: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> "RunResult":
    """Pretrain an encoder on the samples at ``data`` or in a Ray Dataset, and write it to ``output``.

    Several addresses or Ray Datasets are mixed: all rows of a batch come from one of them, in proportion to their
    sizes or to the setting ``data.weights``.

    ``recipe`` is a recipe's name, a file ending in ``.yaml``, or a ``RunConfig``. Instead, ``like`` names a
    configuration of another library, such as ``lightly:simclr``. The options from ``workers``
    ("2:8" for a range) to ``settings`` (a dict such as ``{"encoder.name": "resnet18"}``, or strings
    ``key.path=value``) override parts of it, as the flags of ``raycl train`` do. ``encoder`` may be a module of
    your own that maps images [batch, channels, size, size], or tokens [batch, length], to [batch, dim].
    ``resume`` continues the run in ``output``, by default with its settings, and its data if they have an address.

    Raises ``ConfigError``, ``DataError`` or ``StorageError`` before anything starts, ``RunError`` if the run
    fails later.
    """
    output, uris = as_address("output", output), as_addresses("data", data)
    datasets = listed(dataset)
    if resume and recipe is None and like is None:
        recipe = own_settings(output)
    if resume and data is None and dataset is None:
        uris = own_data(output)
    if (data is None and not uris) == (dataset is None):
        raise ConfigError("give exactly one of data (an address) and dataset (a Ray Dataset)")
    _check_objects(datasets, encoder)
    check_type("address", address, str, optional=True)
    if not (uris or datasets):
        raise ConfigError("the list of data sets is empty; give at least one")
    flags = run_flags(workers=workers, gpu=gpu, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed)
    if like is not None or recipe is None:
        recipe = _recipe_like(recipe, like)
    config, sources, notes = plan_run(
        _named(recipe),
        data=uris or datasets,
        flags=flags,
        settings=settings,
        own_encoder=encoder is not None,
        resumed=output if resume else None,
    )
    from raycl.training.launch import train as launch

    return launch(
        config,
        output=output,
        data=uris,
        sources=sources,
        datasets=datasets,
        notes=notes,
        encoder=encoder,
        resume=resume,
        address=address,
        quiet=quiet,
        debug=debug,
    )


def tune(
    recipe: Address | RunConfig,
    *,
    data: Address | Sequence[Address],
    output: Address = "tuned",
    minutes: float = 10,
    workers: int | str | None = None,
    gpu: bool | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    settings: Settings = (),
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> "TuneResult":
    """Search for better settings of a recipe for ``minutes``, and write the best ones to ``tuned.yaml`` in ``output``.

    Learning rate, temperature, crop scale and batch size vary, as far as they have an effect. Ray Tune halves the trials
    successively by the metric of a run on held-out rows: kNN on labels, or recall of pairs. The recipe is trained to the
    end, and it is the result unless a trial is better. The options have the meaning of ``train``'s.

    Raises ``ConfigError``, ``DataError`` or ``StorageError`` if nothing can be compared or the time is too short, and
    ``RunError`` if the recipe fails.
    """
    check_type("minutes", minutes, float)
    check_type("address", address, str, optional=True)
    output, uris = as_address("output", output), as_addresses("data", data)
    deadline = time.monotonic() + 60 * minutes
    if not uris:
        raise ConfigError("the list of data sets is empty; give at least one")
    flags = run_flags(workers=workers, gpu=gpu, batch_size=batch_size, seed=seed)
    config, sources, notes = plan_run(_named(recipe), data=uris, flags=flags, settings=settings)
    from raycl.training.preflight import find_sources
    from raycl.tuning.plan import check_search

    sources = sources or find_sources(config, uris)
    check_search(config, sources, minutes)
    for note in () if quiet else notes:
        print(note, file=sys.stderr)
    from raycl.tuning.search import search

    return search(
        config,
        output=output,
        sources=sources,
        deadline=deadline,
        address=address,
        quiet=quiet,
        debug=debug,
    )


def evaluate(
    measure: Measure,
    *,
    run: Address,
    test: Address,
    train: Address | None = None,
    gpu: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
    **options: Any,
) -> "EvaluationResult":
    """Evaluate the encoder of ``run`` on the data at ``test``, next to a ``baseline`` of the raw input.

    ``train`` holds the labeled training rows (``knn``, ``linear``), further documents (``retrieval``) or the
    corpus of the baseline (``sts``). ``options`` depend on the measure:

    - ``knn`` and ``linear``: ``columns``, ``network``, ``baseline``, ``max_invalid_fraction``; ``knn`` also ``k``
      and ``temperature``, ``linear`` also ``labels_per_class`` and ``seed``; see
      ``raycl.evaluation.classification.evaluate``.
    - ``retrieval``: ``columns``, ``network``, and of texts ``queries``, ``documents``, ``examples``, ``baseline``; see
      ``raycl.evaluation.retrieval.evaluate_retrieval``.
    - ``sts``: ``text``, ``network``, ``baseline``; see ``raycl.evaluation.sts.evaluate_sts``.

    Raises ``ConfigError`` for an unknown measure or option, ``DataError`` for invalid data and ``StorageError``
    for an unreadable address.
    """
    check_measure(measure)
    if train is None and measure in ("knn", "linear"):
        raise ConfigError(f"evaluate {measure} needs --train, the labeled training set")
    common = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    run, test, train = as_address("run", run), as_address("test", test), optional_address("train", train)
    for name in options.keys() & {"queries", "documents"}:
        options[name] = optional_address(name, options[name])
    check_options(measure, options)
    sets = [test, train, options.get("queries"), options.get("documents")]
    check_inputs(run, data=sets, gpu=gpu, address=address)
    return _evaluator(measure)(run=run, test=test, train=train, **common, **options)


def _check_objects(datasets: list[Any], encoder: object) -> None:
    """Raise ``ConfigError`` for objects that a run would only refuse after its start."""
    if datasets:
        from ray.data import Dataset

        for each in datasets:
            if not isinstance(each, Dataset):
                raise ConfigError(
                    f"dataset must be a Ray Dataset, came {type(each).__name__}; "
                    "make one of it, such as with ray.data.from_pandas or ray.data.from_items"
                )
    if encoder is not None:
        from torch import nn

        if not isinstance(encoder, nn.Module):
            raise ConfigError(
                f"encoder must be a torch.nn.Module, came {encoder!r:.60}; pass the module itself, "
                "or the name of an encoder with settings={'encoder.name': NAME}"
            )


def _recipe_like(recipe: Address | RunConfig | None, like: str | None) -> str:
    """Return the recipe of another library's configuration; raises ``ConfigError`` for two recipes or none."""
    name = "of a configuration" if isinstance(recipe, RunConfig) else str(recipe)
    return recipe_like(None if recipe is None else name, like)


def _named(recipe: Address | RunConfig) -> str | RunConfig:
    return recipe if isinstance(recipe, RunConfig) else str(recipe)


def _evaluator(measure: Measure) -> Any:
    if measure == "retrieval":
        from raycl.evaluation.retrieval import evaluate_retrieval

        return evaluate_retrieval
    if measure == "sts":
        from raycl.evaluation.sts import evaluate_sts

        return evaluate_sts
    from raycl.evaluation.classification import evaluate as evaluate_labels

    return partial(evaluate_labels, measure)


def write_report(runs: Address | Sequence[Address], output: Address | None = None) -> str:
    """Write the report of a run, or a comparison of several; return its path.

    The default is ``report.html`` in the run, or ``comparison.html`` in the working directory for several.
    Raises ``ConfigError`` for no run or a repeated one, ``DataError`` for invalid files and ``StorageError`` for
    an unreadable or unwritable address.
    """
    addresses, page = as_addresses("runs", runs), optional_address("output", output)
    if not addresses:
        raise ConfigError("report needs a run: raycl report RUN, or several to compare them")
    from raycl.report import writer

    if len(addresses) == 1:
        return str(writer.write_report(addresses[0], page))
    return str(writer.write_comparison(addresses, page or writer.COMPARISON))


def replay(
    run: Address,
    *,
    step: int,
    top: int = 5,
    data: Address | Sequence[Address] | None = None,
    html: Address | None = None,
) -> "ReplayedStep":
    """Make a step of a run again in this process, and return its queries with what pushed and pulled them.

    Begins from the nearest checkpoint before ``step``, which counts from 1, or from the start of the run, and needs
    no Ray. ``top`` is the number of negatives of each query, the most similar ones. ``data`` replaces the addresses of
    the run's data if they have moved, and ``html`` is a page to write.

    Raises ``ConfigError`` if the run has no such step or one process cannot repeat it, ``DataError`` if the run or its
    data are missing or not the same, ``StorageError`` for an unreadable or unwritable address and
    ``NonFiniteLossError`` if an earlier step fails.
    """
    check_type("step", step, int)
    check_type("top", top, int)
    page = optional_address("html", html)
    find_run(as_address("run", run))  # before torch is imported
    from raycl.step_replay.step import replay as replay_step

    return replay_step(as_address("run", run), step, top=top, data=as_addresses("data", data), html=page)


def find_steps(
    run: Address, find: str, *, top: int = 5, data: Address | Sequence[Address] | None = None
) -> "FoundSteps":
    """Find steps of a run that are worth a replay.

    ``find`` is ``max-loss`` for the ``top`` logged steps with the largest losses, ``nan`` for those with metrics that
    are not finite and the step that ended the run for this reason, or ``sample=ID`` for the steps that drew a sample.

    Raises ``ConfigError`` for another ``find``, ``DataError`` for an unknown or held-out sample, and as ``replay``
    does.
    """
    check_type("find", find, str)
    check_type("top", top, int)
    find_run(as_address("run", run))
    from raycl.step_replay.find import find_steps as find_in

    return find_in(as_address("run", run), find, top=top, data=as_addresses("data", data))


def certify(
    run: Address, *, steps: int = 4, data: Address | Sequence[Address] | None = None
) -> "Certificate":
    """Check a run against the chain of hashes that it wrote, and compute some of its steps again in float64.

    Needs no Ray. ``steps`` are chosen at random among those next to the checkpoints that are left and to the start of the
    run. ``data`` replaces the addresses of the run's data if they have moved. ``is_valid`` of the result says whether no
    check failed; ``to_dict()`` is the certificate.

    Raises ``ConfigError`` for a negative number of steps, ``DataError`` without a run, and ``StorageError`` for an
    unreadable address.
    """
    check_type("steps", steps, int)
    find_run(as_address("run", run))
    from raycl.step_replay.certificate import certify as certify_run

    return certify_run(as_address("run", run), steps=steps, data=as_addresses("data", data))


def check_certificate(file: Address, run: Address | None = None) -> "Certificate":
    """Check a certificate, and whether the files of its run are still those that were certified.

    Needs neither data nor Ray. ``run`` is the folder of the run, by default the one that the file is in. Raises
    ``DataError`` without a certificate or a run, and ``StorageError`` for an unreadable address.
    """
    from raycl.step_replay.certificate import check_certificate as check

    return check(as_address("file", file), optional_address("run", run))


def run_doctor(
    recipe: Address | RunConfig | None = None,
    *,
    data: Address | None = None,
    output: Address | None = None,
    like: str | None = None,
    workers: int | str | None = None,
    gpu: bool | None = None,
    epochs: int | None = None,
    steps: int | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    settings: Settings = (),
    address: str | None = None,
    quiet: bool = True,
    debug: bool = False,
) -> "list[CheckResult]":
    """Check the cluster, and the storage, data and recipe if given; return the results.

    A result is ``good`` or has a ``remedy``. The options have the meaning of ``train``'s; without a recipe,
    ``settings`` may only name the columns of ``data``. Raises ``ConfigError`` for an unknown setting.
    """
    flags = run_flags(workers=workers, gpu=gpu, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed)
    if like is not None:
        recipe = _recipe_like(recipe, like)
    checks = examine(
        recipe, flags, settings=settings, data=data, output=output, address=address, quiet=quiet, debug=debug
    )
    return list(checks)


def examine(
    recipe: Address | RunConfig | None,
    flags: Mapping[str, Any],
    *,
    settings: Settings,
    data: Address | None,
    output: Address | None,
    address: str | None,
    quiet: bool = False,
    debug: bool = False,
) -> "Iterator[CheckResult]":
    """Run the checks of ``run_doctor``, and yield each result when it is ready; raises ``ConfigError``."""
    check_type("address", address, str, optional=True)
    uri = optional_address("data", data)
    if recipe is None and flags:
        raise ConfigError(
            "--workers, --gpu, --epochs, --steps, --batch-size and --seed need a recipe; give one, for example "
            "raycl doctor simclr"
        )
    columns = command_settings("doctor", settings).get("columns") if recipe is None else None
    from raycl.doctor.run import DoctorRequest, examinations

    request = DoctorRequest(
        data=uri,
        columns=columns,
        output=optional_address("output", output),
        recipe=None if recipe is None else plan_examined(_named(recipe), flags, uri, settings),
        address=address,
        debug=debug,
    )
    yield from examinations(request, quiet=quiet)


def plan_examined(
    recipe: str | RunConfig, flags: Mapping[str, Any], data: str | None, settings: Settings
) -> RunConfig:
    """Return the configuration that ``train`` would use; without readable data, for images of 224 pixels.

    Raises ``ConfigError``; problems of the data are reported by the checks of the data.
    """
    try:
        config = plan_run(recipe, data=[data] if data else [], flags=flags, settings=settings).config
    except (DataError, StorageError):
        if data is None:
            raise  # the YAML file cannot be read
        config = plan_run(recipe, data=[], flags=flags, settings=settings).config
    from raycl.training.preflight import with_absolute_model

    return with_absolute_model(config)
