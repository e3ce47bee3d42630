"""A run from its configuration to its result: check, read the data, train, report."""

import contextlib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any, final

import ray
from torch import nn

from raycl.config import RunConfig
from raycl.data.sources import Source
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, DataError, RayclError, RunError, StoppedError, StorageError
from raycl.models.build import build_towers
from raycl.progress import ProgressLine, rows_read
from raycl.ray_runtime import connect_cluster, require_cpu, unwrap_ray_errors
from raycl.records import CONFIG, failures, read_metrics, write_result
from raycl.storage import Place
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training.banks import open_bank, open_miner
from raycl.training.checkpoint import saved_steps
from raycl.training.controller import prestart_controller
from raycl.training.coordinator import rows_in, start_coordinator
from raycl.training.data_module import DataModule, known_tokenizer
from raycl.training.driver import GracefulShutdown, Printer, check_cluster, train_in_groups
from raycl.training.job import Job
from raycl.training.preflight import (
    ValidatedRun,
    check_data_sets,
    check_negatives,
    check_same_data,
    check_sizes,
    check_streamed,
    describe_data,
    num_stages_so_far,
    save_run_files,
    validate_run,
)
from raycl.training.stages import stage_plans
from raycl.training.transforms import build_transform

SOLVED_LOSS = 1e-4
_HARDER = {
    "text": "give lists of equivalent texts, a teacher (loss distillation), or another encoder",
    "image": "let the views differ more (augment.*), or give more negatives",
    **dict.fromkeys(("pairs", "image_text"), "give harder negatives, such as those of raycl mine"),
}
NOTABLE_LEAKAGE = 0.05  # encoders that cannot use the leak reach up to 0.04


@final
@dataclass(frozen=True, kw_only=True)
class RunResult(Displayable):
    """The result of a run: its output, duration, last metrics, and skipped rows.

    ``invalid_rows`` counts rows that cannot be decoded, by cause. ``skipped`` counts valid rows that the run does
    not use. ``flat_images`` counts images whose pixels all have the same value; the run uses them. ``data_sets``
    has the same counts, and the steps, of each of several data sets. ``goodput`` is the time of steps that counted
    over all time; ``failures`` are the losses of a group of workers, with the time and the steps that each one cost.
    ``chain`` is the hash of the last link of ``chain.jsonl``. ``notices`` are the lines that the run reported while it
    trained and at its end, such as the reason why it was not evaluated.
    """

    output: str
    steps: int
    epochs: int
    seconds: float
    samples_per_second: float
    views_per_second: float
    final: dict[str, Any]
    invalid_rows: dict[str, int]
    skipped: dict[str, int]
    flat_images: int = 0
    goodput: float = 0.0
    failures: list[dict[str, Any]] = field(default_factory=list)
    chain: str = ""
    notices: list[str] = field(default_factory=list)
    data_sets: dict[str, dict[str, Any]] = field(default_factory=dict)

    def to_table(self) -> Table:
        """Show the duration, the last metrics, and the skipped rows."""
        return Table(
            title=f"run {self.output}",
            facts={
                "steps": self.steps,
                "epochs": self.epochs,
                "seconds": round(self.seconds, 1),
                "samples per second": round(self.samples_per_second, 1),
                "views per second": round(self.views_per_second, 1),
                **self.final,
                "invalid rows": self.invalid_rows,
                "skipped": self.skipped,
                "flat images": self.flat_images,
                "goodput": round(self.goodput, 3),
                "failures": len(self.failures),
                **self.data_sets,
            },
        )


def train(
    config: RunConfig,
    *,
    output: str,
    data: Sequence[str] = (),
    sources: Sequence[Source] = (),
    datasets: Sequence[ray.data.Dataset] = (),
    notes: Sequence[str] = (),
    encoder: nn.Module | None = None,
    resume: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> RunResult:
    """Pretrain an encoder as ``raycl.train`` does, on the addresses ``data`` or on ``datasets``.

    ``sources`` are the data sets at these addresses, if they were found already. ``notes`` are printed first.
    """
    if datasets:
        check_data_sets(config, len(datasets))
    with validate_run(
        config,
        output=output,
        resume=resume,
        data=data,
        sources=sources,
        own_encoder=encoder is not None,
        address=address,
    ) as run:
        return train_validated(
            run, datasets=datasets, notes=notes, encoder=encoder, address=address, quiet=quiet, debug=debug
        )


def train_validated(
    run: ValidatedRun,
    *,
    datasets: Sequence[ray.data.Dataset] = (),
    notes: Sequence[str] = (),
    encoder: nn.Module | None = None,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> RunResult:
    """Pretrain an encoder as ``raycl.train`` does, after the checks of ``validate_run``.

    ``datasets`` are required if the run has no address of data. ``notes`` are printed if the encoder can be built.
    Raises as ``raycl.train`` does.
    """

    def report(line: str) -> None:
        if not quiet:
            print(line, file=sys.stderr)

    config, output = run.config, run.output
    tokenizer = known_tokenizer(config, output, resumed=run.resumed) if config.has_texts else None
    _check_towers(config, encoder, Vocabulary(tokenizer) if tokenizer else Vocabulary.stand_in())
    for note in (*notes, *_untrained_numbers(config)):
        report(note)
    if dashboard := connect_cluster(address, debug=debug):
        report(f"dashboard: http://{dashboard}")
    with unwrap_ray_errors():
        require_cpu(autoscaling=config.autoscaling)
    prestart_controller()
    if config.gpu:
        report(f"GPUs compute in {config.tower_precision} (precision={config.precision})")
    with (
        unwrap_ray_errors(),
        start_coordinator({"run": output.name, "recipe": config.recipe}) as coordinator,
        GracefulShutdown(coordinator, output, run.lease.check) as shutdown,
    ):
        data = DataModule(config, coordinator, run.sources or datasets, run.evaluation)
        _report_skipped(data, run, report)
        labeled = [source for source in (*run.sources, run.evaluation) if source and source.has_labels]
        names = {source.label_names for source in labeled}
        described = describe_data(
            [source.uri for source in run.sources],
            [each.num_rows for each in data.data_sets],
            data.classes,
            streamed=data.streamed,
            label_names=names.pop() if len(names) == 1 else None,
            files=[source.files_fingerprint for source in run.sources],
            fragments=[source.fragments_fingerprint for source in run.sources],
            evaluation=run.evaluation,
            own_network=encoder is not None,
        )
        _check_data(run, data, described)
        check_cluster(config, streamed=data.streamed, report=report)
        vocabulary = _learn_vocabulary(run, data, tokenizer, report) if config.has_texts else None
        if vocabulary and tokenizer is None:
            _check_towers(config, encoder, vocabulary)
        job = _read_data(run, data, coordinator, described, report, quiet=quiet)
        job = replace(job, vocabulary=vocabulary, network=encoder)
        _report_unused(config, output, job.num_train, report)
        with open_bank(job, report) as bank, open_miner(replace(job, bank=bank), report) as job:
            # Only now: a refused run must not leave an output that would require --resume.
            run.lease.check()
            with _write_error(run, shutdown), unwrap_ray_errors():
                save_run_files(output, config, described, vocabulary)
                shutdown.begin()
                final = train_in_groups(job, shutdown, report, quiet=quiet)
                shutdown.end()
                remark = _noticing(report, coordinator)
                _warn_of_leakage(config, final, remark)
                _warn_of_baseline(config, final, remark)
                _warn_of_solved_task(config, output, remark)
                return _write_result(run, data, final, coordinator)


def _learn_vocabulary(
    run: ValidatedRun, data: DataModule, tokenizer: Tokenizer | None, report: Printer
) -> Vocabulary:
    if tokenizer is None:
        report("training a tokenizer on the texts")
    elif run.config.counts_tokens:
        report("counting the tokens of the texts")
    return data.learn_vocabulary(tokenizer, run.corpus)


def _check_towers(config: RunConfig, network: nn.Module | None, vocabulary: Vocabulary) -> None:
    """Raise ``ConfigError`` for invalid views or towers before the workers start."""
    build_transform(config, vocabulary.tokenizer)
    if network is None:
        build_towers(config, vocabulary)


def _report_skipped(data: DataModule, run: ValidatedRun, report: Printer) -> None:
    for source in (*run.sources, *filter(None, [run.corpus, run.evaluation])):
        for line in source.unread():
            report(line)
    if not data.can_be_evaluated and run.config.evaluation.every_epochs != 0:
        report("the samples have no labels: no periodic kNN; evaluation.data may name labeled ones")


def _check_data(run: ValidatedRun, data: DataModule, described: dict[str, Any]) -> None:
    """Raise ``ConfigError`` or ``DataError`` if the data do not match the configuration or the earlier run."""
    check_sizes(run.config, {each.name: each.num_rows for each in data.data_sets})
    check_same_data(run.output, described)
    if data.streamed:
        check_streamed(run.config)
        check_negatives(run.config, data.columns, streamed=True)


def _read_data(
    run: ValidatedRun,
    data: DataModule,
    coordinator: Any,
    described: dict[str, Any],
    report: Printer,
    *,
    quiet: bool,
) -> Job:
    """Read all rows, or only the evaluation rows of a stream; return the job without its bank.

    The fingerprints of weights, if there are any, are added to the description of the data.
    """
    config, streamed = run.config, data.streamed
    title = "reading the rows for evaluation" if streamed else "reading"
    with ProgressLine(title, rows_read(coordinator, data.num_read_first()), quiet=quiet):
        decoded = data.read_rows()
    for each in data.data_sets:
        each.stats().check(config.data.max_invalid_fraction)
    num_train = data.num_train(decoded)
    data.check_classes(decoded)
    check_sizes(config, dict(zip((each.name for each in data.data_sets), num_train, strict=True)))
    # A stream may have a few more rows than expected, but no more than all.
    _check_length(config, run.output, [data.num_rows] if streamed else num_train)
    has_slots = config.negatives.has_slots
    needs_ids = has_slots or (streamed and config.negatives.mined.num > 0)
    sample_id = data.sample_ids(decoded) if needs_ids else None
    guide = data.guide(decoded)
    if data.columns.weight is not None and not streamed:
        described["weights"] = [each.fingerprint(["sample_id", "weight.value"]) for each in decoded]
        check_same_data(run.output, described)
    blocks = tuple(tuple(each.blocks()) for each in decoded)
    if run.evaluation is not None:
        report("reading evaluation.data")
    evaluation = data.read_evaluation_rows(decoded)
    return Job(
        config=config,
        output=run.output,
        blocks=blocks,
        stream=data.stream(run.output) if streamed else None,
        num_train=tuple(num_train),
        holdout=data.holdout,
        coordinator=coordinator,
        is_evaluated=data.is_evaluated,
        columns=data.columns,
        evaluation=evaluation,
        lease=run.lease,
        sample_id=None if sample_id is None else ray.put(sample_id),
        num_samples=len(sample_id) if sample_id is not None and has_slots else None,
        fingerprint=None if streamed else sum(each.fingerprint() for each in decoded) % 2**64,
        corpus_fingerprint=data.corpus_fingerprint,
        guide=None if guide is None else ray.put(guide),
    )


def _report_unused(config: RunConfig, output: Place, num_train: Sequence[int], report: Printer) -> None:
    """Report if the batches of an epoch of a new run leave out a tenth of the rows of the only data set, or more."""
    if len(num_train) > 1 or config.data.samples_per_class is not None or (output / CONFIG).exists():
        return  # a run that exists keeps its batch size
    [rows] = num_train
    reported = set[int]()
    for number, stage in enumerate(config.stages):
        steps, unused = divmod(rows, stage.batch_size)
        is_whole = stage.steps is None or stage.steps > steps
        fitting = rows // (steps + 1) // config.workers_of(stage) * config.workers_of(stage)
        if fitting and is_whole and unused >= rows / 10 and stage.batch_size not in reported:
            reported.add(stage.batch_size)
            report(
                f"each epoch leaves out {unused:,} of {rows:,} rows, other ones each time; a stages.{number}.batch_size of "
                f"about {fitting:,} instead of {stage.batch_size:,} uses nearly all"
            )


def _check_length(config: RunConfig, output: Place, num_train: Sequence[int]) -> None:
    """Refuse to resume with fewer steps than the run has made: its log would contradict its settings.

    Stages that ``--resume`` appends do not count.
    """
    num_stages = num_stages_so_far(output) or len(config.stages)
    where = f" before stages.{num_stages}" if num_stages < len(config.stages) else ""
    made = max(saved_steps(output), default=0)
    planned = sum(plan.num_steps for plan in stage_plans(config, num_train=num_train)[:num_stages])
    if made > planned:
        raise ConfigError(
            f"the run has made {made:,} steps, and --resume would train for {planned:,}{where}; repeat its --epochs or "
            "--steps, or give more"
        )


@contextlib.contextmanager
def _write_error(run: ValidatedRun, shutdown: GracefulShutdown) -> Iterator[None]:
    """Write the error that ends the run to ``result.json``, and raise it again."""
    try:
        yield
    except (RayclError, KeyboardInterrupt, SystemExit) as error:
        shutdown.end()
        if isinstance(error, RayclError):
            status, text = "stopped" if isinstance(error, StoppedError) else "failed", str(error)
        else:
            status = "stopped"
            text = "the run was interrupted before it saved a checkpoint; resume the last one with --resume"
        # An error here must not hide the one that ended the run.
        with contextlib.suppress(StorageError, RunError):
            run.lease.check()
            write_result(run.output, {"status": status, "error": text})
        raise


def _write_result(run: ValidatedRun, data: DataModule, final: dict[str, Any], coordinator: Any) -> RunResult:
    rows = rows_in(coordinator)
    steps, epochs, seconds = final.pop("step"), final.pop("epoch"), final.pop("seconds")
    samples_per_second = final.pop("samples") / max(seconds, 1e-9)
    result = RunResult(
        output=run.output.uri,
        steps=steps,
        epochs=epochs,
        seconds=seconds,
        samples_per_second=samples_per_second,
        views_per_second=samples_per_second * run.config.num_views,
        final=final,
        invalid_rows=dict(rows.invalid),
        skipped=dict(rows.skipped),
        flat_images=rows.num_flat,
        goodput=final.pop("goodput"),
        failures=failures(run.output),
        chain=final.pop("chain"),
        notices=ray.get(coordinator.notices.remote()),
        data_sets=data.counts(final.pop("data_set_steps")),
    )
    run.lease.check()
    values = {name: value for name, value in vars(result).items() if name != "output"}
    if not result.data_sets:
        del values["data_sets"]
    write_result(run.output, {"status": "finished", **values})
    return result


def _untrained_numbers(config: RunConfig) -> Iterator[str]:
    """Yield a line if the prefixes of all stages leave numbers of the embedding without a loss."""
    dim = config.projection_head.dim
    lengths = [max(stage.matryoshka_dims or [dim]) for stage in config.stages]
    if (longest := max(lengths)) < dim:
        yield (
            f"stages.{lengths.index(longest)}.matryoshka_dims ends with {longest}: the other {dim - longest} numbers of "
            f"the embedding are not trained; add {dim} to train them too"
        )


def _noticing(report: Printer, coordinator: Any) -> Printer:
    """Return a printer whose lines are also notices in the result."""

    def remark(line: str) -> None:
        coordinator.add_notice.remote(line)
        report(line)

    return remark


def _warn_of_leakage(config: RunConfig, final: dict[str, Any], report: Printer) -> None:
    leakage = final.get("batchnorm_leakage", 0.0)
    if config.batchnorm in ("local", "local_view", "synchronized") and leakage > NOTABLE_LEAKAGE:
        report(
            f"BatchNorm leaks the positives: shared statistics make the pretext task easier by {leakage:.3f}; "
            f"set batchnorm to {'group or layer' if config.has_texts else 'shuffled, group or layer'}"
        )


def _warn_of_baseline(config: RunConfig, final: dict[str, Any], report: Printer) -> None:
    name = config.evaluation_metric
    value, baseline = final.get(name), final.get(f"baseline_{name}")
    if value is not None and baseline is not None and value <= baseline:
        advice = "train longer (--epochs)"
        if baseline >= 1:
            advice = "no encoder can be, as these rows are too easy or too few"
        report(
            f"the encoder is not better than {config.baseline} on held-out rows: "
            f"{name} {value:.3f} and {baseline:.3f}; {advice}"
        )


def _warn_of_solved_task(config: RunConfig, output: Place, report: Printer) -> None:
    """Report a cross-entropy near 0 in the last tenth of the last stage's steps, which have taught nothing."""
    if not config.ends_with_cross_entropy:
        return
    try:
        lines = [line for line in read_metrics(output) if line.get("stage", 0) == len(config.stages) - 1]
    except (DataError, StorageError):  # the run has its result without this line
        return
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    first, end = min(losses, default=0), max(losses, default=0)
    last = [loss for step, loss in losses.items() if step >= end - (end - first) / 10]
    if last and median(last) < SOLVED_LOSS:
        report(
            f"the median loss of the last tenth of the steps is below {SOLVED_LOSS}: the task is already solved; "
            f"{_HARDER[config.data.kind]}"
        )
