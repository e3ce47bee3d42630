"""Each command as a function: the same options, and values in place of printed lines."""

import inspect
import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

from raycl.cli.plan import Settings, check_measure, column_settings, plan_run, run_flags, settings_of
from raycl.config import RunConfig
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.preflight import check_inputs

if TYPE_CHECKING:
    import ray
    from torch import nn

    from raycl.display import EvaluationResult
    from raycl.doctor import CheckResult, DoctorRequest
    from raycl.training.launch import RunResult

Address = str | os.PathLike[str]
Measure = Literal["knn", "linear", "retrieval", "sts"]
IMAGE_SIZE = 224  # that of a recipe whose images nobody could look at


def train(
    recipe: Address | RunConfig,
    *,
    output: Address,
    data: Address | None = None,
    dataset: "ray.data.Dataset | None" = None,
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

    ``recipe`` is a recipe's name, a file ending in ``.yaml``, or a ``RunConfig``. The options from ``workers``
    ("2:8" for a range) to ``settings`` (a dict such as ``{"encoder.name": "resnet18"}``, or texts
    ``key.path=value``) replace parts of it, as the flags of ``raycl train`` do. ``encoder`` may be a module of
    your own that maps images [batch, channels, size, size], or tokens [batch, length], to [batch, dim].

    Raises ``ConfigError``, ``DataError`` or ``StorageError`` before anything starts, ``RunError`` if the run
    fails later.
    """
    if (data is None) == (dataset is None):
        raise ConfigError("give exactly one of data (an address) and dataset (a Ray Dataset)")
    uri = None if data is None else str(data)
    flags = run_flags(workers=workers, gpu=gpu, epochs=epochs, steps=steps, batch_size=batch_size, seed=seed)
    config = plan_run(_named(recipe), data=uri or dataset, flags=flags, settings=settings)
    from raycl.training.launch import train as launch

    return launch(
        config,
        output=str(output),
        data=uri,
        dataset=dataset,
        encoder=encoder,
        resume=resume,
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
    """Judge the encoder of ``run`` on the set ``test``, and the raw input beside it as the ``baseline``.

    ``train`` holds the labeled rows that decide (``knn``, ``linear``), further documents (``retrieval``) or the
    corpus of the baseline (``sts``). ``options`` are those of the measure:

    - ``knn`` and ``linear``: ``columns``, ``network``, ``k``, ``temperature``, ``labels_per_class``, ``seed``,
      ``baseline``, ``max_invalid_fraction``; see ``raycl.evaluation.classification.evaluate``.
    - ``retrieval``: ``columns``, ``queries``, ``documents``, ``examples``, ``baseline``; see
      ``raycl.evaluation.retrieval.evaluate_retrieval``.
    - ``sts``: ``text``, ``baseline``; see ``raycl.evaluation.sts.evaluate_sts``.

    Raises ``ConfigError`` for another measure or option, ``DataError`` and ``StorageError`` as the measures do.
    """
    check_measure(measure)
    if train is None and measure in ("knn", "linear"):
        raise ConfigError(f"evaluate {measure} needs --train, the labeled set that decides")
    common = {"gpu": gpu, "address": address, "quiet": quiet, "debug": debug}
    places = {"run": str(run), "test": str(test), "train": None if train is None else str(train)}
    sets = [test, train, options.get("queries"), options.get("documents")]
    check_inputs(str(run), data=[str(each) for each in sets if each is not None], gpu=gpu, address=address)
    judge = _judge_of(measure)
    known = inspect.signature(judge).parameters.keys() - common.keys() - places.keys()
    if unknown := sorted(options.keys() - known):
        raise ConfigError(
            f"evaluate {measure} has no option {unknown[0]!r}; there are {', '.join(sorted(known))}"
        )
    return judge(**places, **common, **options)


def _named(recipe: Address | RunConfig) -> str | RunConfig:
    return recipe if isinstance(recipe, RunConfig) else str(recipe)


def _judge_of(measure: Measure) -> Any:
    if measure == "retrieval":
        from raycl.evaluation.retrieval import evaluate_retrieval

        return evaluate_retrieval
    if measure == "sts":
        from raycl.evaluation.sts import evaluate_sts

        return evaluate_sts
    from raycl.evaluation.classification import evaluate as evaluate_labels

    return partial(evaluate_labels, measure)


def write_report(runs: Address | Sequence[Address], output: Address | None = None) -> str:
    """Write the page of a run, or one that compares several; return where it lies.

    By default that is ``report.html`` in the run, ``comparison.html`` here for several. Raises ``ConfigError``
    for no run or one that is named twice, ``DataError`` and ``StorageError`` for what cannot be read or written.
    """
    asked = [str(each) for each in ([runs] if isinstance(runs, str | os.PathLike) else runs)]
    if not asked:
        raise ConfigError("report needs a run: raycl report RUN, or several to compare them")
    if len(set(asked)) < len(asked):
        twice = next(each for each in asked if asked.count(each) > 1)
        raise ConfigError(f"{twice} is named twice; name each run once")
    from raycl.report import writer

    if len(asked) == 1:
        return str(writer.write_report(asked[0], None if output is None else str(output)))
    return str(writer.write_comparison(asked, str(output or writer.COMPARISON)))


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
    """Check the cluster, and the storage, the data and the recipe where they are given; return the findings.

    A finding is ``good`` or has a ``remedy``. The options are those of ``train``; without a recipe ``settings``
    name the columns of ``data``. Raises ``ConfigError`` for a setting that there is not.
    """
    from raycl.doctor import examinations

    flags = run_flags(workers=workers, gpu=gpu, batch_size=batch_size)
    request = doctor_request(
        recipe, flags, settings=settings, data=data, output=output, address=address, debug=debug
    )
    return list(examinations(request, quiet=quiet))


def doctor_request(
    recipe: Address | RunConfig | None,
    flags: Mapping[str, Any],
    *,
    settings: Settings,
    data: Address | None,
    output: Address | None,
    address: str | None,
    debug: bool,
) -> "DoctorRequest":
    """Return the examination that was asked for; raises ``ConfigError``."""
    from raycl.doctor import DoctorRequest

    uri = None if data is None else str(data)
    if recipe is None and flags:
        raise ConfigError(
            "--workers, --gpu and --batch-size are a recipe's: name one, for example raycl doctor simclr"
        )
    return DoctorRequest(
        data=uri,
        columns=column_settings(settings) if recipe is None else None,
        output=None if output is None else str(output),
        recipe=None if recipe is None else plan_examined(_named(recipe), flags, uri, settings),
        address=address,
        debug=debug,
    )


def plan_examined(
    recipe: str | RunConfig, flags: Mapping[str, Any], data: str | None, settings: Settings
) -> RunConfig:
    """Return the run that ``train`` would make of it; without readable data, for images of 224 pixels.

    Raises ``ConfigError``; what is wrong with the data is found when they are looked at.
    """
    is_stated = isinstance(recipe, RunConfig) or recipe.endswith((".yaml", ".yml"))
    if data is not None or is_stated:
        try:
            return plan_run(recipe, data=data or "", flags=flags, settings=settings)
        except (DataError, StorageError):
            if data is None:
                raise  # it is the file that cannot be read
    # The setting comes first: one that was given replaces it.
    sized = {"data.image_size": IMAGE_SIZE, **settings_of(settings)}
    return plan_run(recipe, data="", flags=flags, settings=sized)
