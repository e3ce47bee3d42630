"""The commands as functions, with the same options; results are returned instead of printed."""

import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from raycl.cli.plan import Settings, check_measure, command_settings, plan_run, run_flags
from raycl.config import RunConfig
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.preflight import check_inputs, check_options
from raycl.recipes import recipe_like

if TYPE_CHECKING:
    import ray
    from torch import nn

    from raycl.display import EvaluationResult
    from raycl.doctor import CheckResult
    from raycl.step_replay.certificate import Certificate
    from raycl.step_replay.find import FoundSteps
    from raycl.step_replay.step import ReplayedStep
    from raycl.training.launch import RunResult
    from raycl.tuning.search import TuneResult

Address = str | os.PathLike[str]
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

    Raises ``ConfigError``, ``DataError`` or ``StorageError`` before anything starts, ``RunError`` if the run
    fails later.
    """
    if (data is None) == (dataset is None):
        raise ConfigError("give exactly one of data (an address) and dataset (a Ray Dataset)")
    datasets, addresses = _listed(dataset), _listed(data)
    _check_types(output, addresses, datasets, encoder)
    uris = list(map(str, addresses))
    if not (uris or datasets):
        raise ConfigError("the list of data sets is empty; give at least one")
    flags = run_flags(workers=workers, gpu=gpu, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed)
    if like is not None or recipe is None:
        name = "of a configuration" if isinstance(recipe, RunConfig) else str(recipe)
        recipe = recipe_like(None if recipe is None else name, like)
    config, sources, notes = plan_run(
        _named(recipe),
        data=uris or datasets,
        flags=flags,
        settings=settings,
        own_encoder=encoder is not None,
        resumed=str(output) if resume else None,
    )
    from raycl.training.launch import train as launch

    return launch(
        config,
        output=str(output),
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
    deadline, uris = time.monotonic() + 60 * minutes, list(map(str, _listed(data)))
    if not uris:
        raise ConfigError("the list of data sets is empty; give at least one")
    flags = run_flags(workers=workers, gpu=gpu, batch_size=batch_size, seed=seed)
    config, sources, notes = plan_run(_named(recipe), data=uris, flags=flags, settings=settings)
    from raycl.data.sources import find_source
    from raycl.training.preflight import column_names
    from raycl.tuning.plan import check_search

    sources = sources or tuple(find_source(each, column_names(config)) for each in uris)
    check_search(config, sources, minutes)
    for note in () if quiet else notes:
        print(note, file=sys.stderr)
    from raycl.tuning.search import search

    return search(
        config,
        output=str(output),
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
    - ``retrieval``: ``columns``, and of texts ``queries``, ``documents``, ``examples``, ``baseline``; see
      ``raycl.evaluation.retrieval.evaluate_retrieval``.
    - ``sts``: ``text``, ``baseline``; see ``raycl.evaluation.sts.evaluate_sts``.

    Raises ``ConfigError`` for an unknown measure or option, ``DataError`` for invalid data and ``StorageError``
    for an unreadable address.
    """
    check_measure(measure)
    if train is None and measure in ("knn", "linear"):
        raise ConfigError(f"evaluate {measure} needs --train, the labeled training set")
    common = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    places = {"run": str(run), "test": str(test), "train": None if train is None else str(train)}
    check_options(measure, options)
    sets = [test, train, options.get("queries"), options.get("documents")]
    check_inputs(str(run), data=[str(each) for each in sets if each is not None], gpu=gpu, address=address)
    return _evaluator(measure)(**places, **common, **options)


def _listed(given: Any) -> list[Any]:
    """Return what was given once or in a list; nothing for None."""
    return list(given) if isinstance(given, list | tuple) else [] if given is None else [given]


def _check_types(output: object, addresses: list[Any], datasets: list[Any], encoder: object) -> None:
    """Raise ``ConfigError`` for values that a run would only refuse after its start."""
    for name, value in (("output", output), *(("data", each) for each in addresses)):
        if not isinstance(value, str | os.PathLike):
            raise ConfigError(f"{name} must be an address, came {type(value).__name__}; give text or a path")
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
    addresses = [str(each) for each in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not addresses:
        raise ConfigError("report needs a run: raycl report RUN, or several to compare them")
    if len(set(addresses)) < len(addresses):
        repeated = next(each for each in addresses if addresses.count(each) > 1)
        raise ConfigError(f"{repeated} is given twice; give each run once")
    from raycl.report import writer

    if len(addresses) == 1:
        return str(writer.write_report(addresses[0], None if output is None else str(output)))
    return str(writer.write_comparison(addresses, str(output or writer.COMPARISON)))


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
    from raycl.step_replay.step import replay as replay_step

    page = None if html is None else str(html)
    return replay_step(str(run), step, top=top, data=[str(each) for each in _listed(data)], html=page)


def find_steps(
    run: Address, find: str, *, top: int = 5, data: Address | Sequence[Address] | None = None
) -> "FoundSteps":
    """Find steps of a run that are worth a replay.

    ``find`` is ``max-loss`` for the ``top`` logged steps with the largest losses, ``nan`` for those with metrics that
    are not finite and the step that ended the run for this reason, or ``sample=ID`` for the steps that drew a sample.

    Raises ``ConfigError`` for another ``find``, ``DataError`` for an unknown or held-out sample, and as ``replay``
    does.
    """
    from raycl.step_replay.find import find_steps as find_in

    return find_in(str(run), find, top=top, data=[str(each) for each in _listed(data)])


def certify(
    run: Address, *, steps: int = 4, data: Address | Sequence[Address] | None = None
) -> "Certificate":
    """Check a run against the chain of hashes that it wrote, and compute some of its steps again in float64.

    Needs no Ray. ``steps`` are chosen at random among those next to the checkpoints that are left and to the start of the
    run. ``data`` replaces the addresses of the run's data if they have moved. ``is_valid`` of the result says whether no
    check failed; ``to_dict()`` is the certificate.

    Raises ``ConfigError`` for a negative number of steps, ``DataError`` if there is no run, and ``StorageError`` for an
    unreadable address.
    """
    from raycl.step_replay.certificate import certify as certify_run

    return certify_run(str(run), steps=steps, data=[str(each) for each in _listed(data)])


def check_certificate(file: Address, run: Address | None = None) -> "Certificate":
    """Check a certificate, and whether the files of its run are still those that were certified.

    Needs neither data nor Ray. ``run`` is the folder of the run, by default the one that the file is in. Raises
    ``DataError`` if there is no certificate or no run, and ``StorageError`` for an unreadable address.
    """
    from raycl.step_replay.certificate import check_certificate as check

    return check(str(file), None if run is None else str(run))


def run_doctor(
    recipe: Address | RunConfig | None = None,
    *,
    data: Address | None = None,
    output: Address | None = None,
    workers: int | str | None = None,
    gpu: bool | None = None,
    batch_size: int | None = None,
    settings: Settings = (),
    address: str | None = None,
    quiet: bool = True,
    debug: bool = False,
) -> "list[CheckResult]":
    """Check the cluster, and the storage, data and recipe if given; return the results.

    A result is ``good`` or has a ``remedy``. The options have the meaning of ``train``'s; without a recipe,
    ``settings`` may only name the columns of ``data``. Raises ``ConfigError`` for an unknown setting.
    """
    flags = run_flags(workers=workers, gpu=gpu, batch_size=batch_size)
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
    uri = None if data is None else str(data)
    if recipe is None and flags:
        raise ConfigError(
            "--workers, --gpu and --batch-size need a recipe; give one, for example raycl doctor simclr"
        )
    columns = command_settings("doctor", settings).get("columns") if recipe is None else None
    from raycl.doctor import DoctorRequest, examinations

    request = DoctorRequest(
        data=uri,
        columns=columns,
        output=None if output is None else str(output),
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
