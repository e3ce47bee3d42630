"""From a configuration to a finished run: check, read, train, record."""

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import ray
from torch import nn

from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml
from raycl.data.coordinator import rows_in, start_coordinator
from raycl.data.sources import Source
from raycl.data.streaming import StreamingSampler
from raycl.display import Displayable, Table
from raycl.errors import ConfigError, RayclError, RunError, StoppedError, StorageError
from raycl.gpus import accelerators, check_accelerator, check_bfloat16
from raycl.models.registry import SPEC, TOKENIZER
from raycl.negatives.bank import Bank
from raycl.negatives.start import start_bank
from raycl.progress import ProgressLine, rows_read
from raycl.provenance import save_command_line
from raycl.ray_runtime import check_resources, connect_cluster, crowding, unwrap_ray_errors
from raycl.records import write_result
from raycl.storage import Place, absolute
from raycl.tokenization import Tokenizer, Vocabulary
from raycl.training import build
from raycl.training.checkpoint import saved_steps
from raycl.training.data_module import DataModule, known_tokenizer
from raycl.training.driver import GracefulShutdown, WorkerGroups, cpus_of_a_worker, spare_cpus
from raycl.training.job import Job
from raycl.training.preflight import ValidatedRun, admitted, check_size
from raycl.training.resume import CONFIG, DATA, check_same_data

NOTABLE_LEAKAGE = 0.05  # an encoder that cannot read the mark measured up to 0.04


@final
@dataclass(frozen=True, kw_only=True)
class RunResult(Displayable):
    """What came of a run: where it lies, how long it took, its last metrics, and what it left out.

    ``broken_rows`` counts by cause rows that cannot be used, ``left_out`` what is sound but of no use;
    ``flat_images`` were used though all their pixels have one value.
    """

    output: str
    steps: int
    epochs: int
    seconds: float
    samples_per_second: float
    final: dict[str, Any]
    broken_rows: dict[str, int]
    left_out: dict[str, int]
    flat_images: int = 0

    def to_table(self) -> Table:
        """Show how long it took, the last metrics, and what was left out."""
        return Table(
            title=f"run {self.output}",
            facts={
                "steps": self.steps,
                "epochs": self.epochs,
                "seconds": round(self.seconds, 1),
                "samples a second": round(self.samples_per_second, 1),
                **self.final,
                "broken rows": self.broken_rows,
                "left out": self.left_out,
                "flat images": self.flat_images,
            },
        )


def train(
    config: RunConfig,
    *,
    output: str,
    data: str | None = None,
    dataset: ray.data.Dataset | None = None,
    encoder: nn.Module | None = None,
    resume: bool = False,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> RunResult:
    """Pretrain an encoder as ``raycl.train`` does; one of ``data`` and ``dataset`` is given."""
    with admitted(
        config,
        output=output,
        resume=resume,
        data=data,
        own_encoder=encoder is not None,
        address=address,
    ) as admission:
        return train_admitted(
            admission, dataset=dataset, encoder=encoder, address=address, quiet=quiet, debug=debug
        )


def train_admitted(
    admission: ValidatedRun,
    *,
    dataset: ray.data.Dataset | None = None,
    encoder: nn.Module | None = None,
    address: str | None = None,
    quiet: bool = False,
    debug: bool = False,
) -> RunResult:
    """Pretrain an encoder as ``raycl.train`` does, once output and data are looked at.

    ``dataset`` is for an admission without an address. Raises as ``raycl.train`` does.
    """
    config, place = admission.config, admission.output
    tokenizer = known_tokenizer(config, place, resumed=admission.resumed) if config.has_texts else None
    _check_parts(config, encoder, tokenizer)
    dashboard = connect_cluster(address, debug=debug)
    if dashboard and not quiet:
        print(f"dashboard: http://{dashboard}", file=sys.stderr)
    if config.gpu and not quiet:
        print(f"GPUs compute in {config.tower_precision} (precision={config.precision})", file=sys.stderr)
    tags = {"run": place.name, "recipe": config.recipe}
    with (
        unwrap_ray_errors(),
        start_coordinator(tags) as logbook,
        GracefulShutdown(logbook, place, admission.lease.check) as signals,
    ):
        launch = _Launch(admission, encoder, logbook, signals, tokenizer, quiet=quiet)
        return launch.run(dataset)


def _check_parts(config: RunConfig, network: nn.Module | None, tokenizer: Tokenizer | None) -> None:
    """Find an impossible view or encoder here, not on the workers."""
    vocabulary = Vocabulary.stand_in() if tokenizer is None else Vocabulary(tokenizer)
    modality = build.modality(config, vocabulary)
    modality.drawing()
    if network is None:
        build.towers(config, modality)


@final
class _Launch:
    def __init__(
        self,
        admission: ValidatedRun,
        network: nn.Module | None,
        logbook: Any,
        signals: GracefulShutdown,
        tokenizer: Tokenizer | None,
        *,
        quiet: bool,
    ) -> None:
        self._admission, self._network = admission, network
        self._config, self._output = admission.config, admission.output
        self._tokenizer = tokenizer
        self._logbook, self._signals, self._quiet = logbook, signals, quiet

    def run(self, dataset: ray.data.Dataset | None) -> RunResult:
        data, source, lease = self._admission.data, self._admission.source, self._admission.lease
        samples = DataModule(self._config, self._logbook, source, dataset)
        self._tell_what_is_left_out(samples, source)
        check_size(self._config, samples.num_rows)
        streamed = samples.must_stream()
        described = {
            "data": data and absolute(data),
            "num_rows": samples.num_rows,
            "streamed": streamed,
            "classes": samples.classes,
            "workers": [_written(*self._config.worker_range(stage)) for stage in self._config.stages],
        }
        check_same_data(self._output, described)
        if streamed and any(stage.discount_frequent for stage in self._config.stages):
            raise ConfigError(
                "discount_frequent counts how often each document occurs, which nobody knows of streamed data; "
                "set data.cache=materialize, or leave it out"
            )
        self._check_cluster(streamed)
        vocabulary = self._learn_vocabulary(samples)
        decoded, stream = self._open(samples, streamed)
        rows = rows_in(self._logbook)
        rows.check(self._config.data.max_bad_fraction)
        num_train = samples.num_train_expected() if streamed else rows.num_train
        check_size(self._config, num_train)
        job = Job(
            config=self._config,
            output=self._output,
            blocks=tuple(_blocks(decoded)),
            stream=stream,
            num_train=num_train,
            holdout=samples.holdout,
            logbook=self._logbook,
            judged=samples.holdout.test > 0 and samples.can_be_judged,
            network=self._network,
            columns=samples.columns,
            vocabulary=vocabulary,
            lease=lease,
        )
        if self._config.negatives.store == "memory_bank":
            sample_id = samples.sample_ids(None if streamed else decoded)
            job = replace(job, sample_id=ray.put(sample_id), num_samples=len(sample_id))
        with self._bank(job) as bank:
            # Only now: a run that is refused leaves no output that another one would have to resume.
            lease.check()
            (self._output / SPEC).delete()  # until the end, the encoder is that of the last checkpoint
            (self._output / CONFIG).write_text(config_to_yaml(self._config))
            (self._output / DATA).write_text(json.dumps(described) + "\n")
            save_command_line(self._output)
            if vocabulary is not None:
                (self._output / TOKENIZER).write_text(vocabulary.tokenizer.to_json())
            self._signals.begin()
            write_result(self._output, {"status": "running"})
            try:
                with unwrap_ray_errors():
                    final = self._groups().train(replace(job, bank=bank))
                    self._signals.end()
                    return self._conclude(final)
            except (RayclError, KeyboardInterrupt, SystemExit) as error:
                self._signals.end()
                # What went wrong first is told, not that this cannot be written either.
                with contextlib.suppress(StorageError, RunError):
                    lease.check()
                    write_result(self._output, _result_of(error))
                raise

    def _groups(self) -> WorkerGroups:
        return WorkerGroups(
            self._config, self._output, self._logbook, self._signals, self._tell, quiet=self._quiet
        )

    def _learn_vocabulary(self, samples: DataModule) -> Vocabulary | None:
        """Count the tokens of the texts, and refuse what would not fit them."""
        if self._config.has_texts:
            self._tell(
                "counting the tokens of the texts" if self._tokenizer else "training a tokenizer on the texts"
            )
        vocabulary = samples.learn_vocabulary(self._tokenizer)
        if vocabulary is not None and self._network is None:
            _check_parts(self._config, None, vocabulary.tokenizer)
        return vocabulary

    @contextlib.contextmanager
    def _bank(self, job: Job) -> Iterator[Bank | None]:
        """Hold the negatives in actors while the run goes on, if it wants that."""
        negatives, held_by = self._config.negatives, self._config.bank.held_by
        if job.num_samples is not None and negatives.num_negatives > job.num_samples:
            raise ConfigError(
                f"negatives.num_negatives {negatives.num_negatives} is more than the {job.num_samples} samples "
                "of the memory bank; set it lower"
            )
        if negatives.store == "none" or held_by == "workers":
            yield None
            return
        plan = build.bank_spec(
            self._config, output=self._output.uri, name=_bank_name(self._output), num_samples=job.num_samples
        )
        sample_id = None if job.sample_id is None else ray.get(job.sample_id)
        bank = start_bank(plan, sample_id, cluster_grows=self._config.autoscaling)
        self._tell(
            f"bank: {plan.name} (raycl bank stats {plan.name} --address {ray.get_runtime_context().gcs_address})"
        )
        try:
            yield bank
            self._prune(bank)
        finally:
            if not plan.detached:
                bank.stop()

    def _tell_what_is_left_out(self, samples: DataModule, source: Source | None) -> None:
        if source is not None and source.ignored:
            ignored = ", ".join(f"{count} {ending}" for ending, count in source.ignored)
            self._tell(f"ignored files that are no images: {ignored}")
        if not samples.can_be_judged and self._config.evaluation.every_epochs != 0:
            self._tell("the samples have no labels: no periodic kNN")

    def _prune(self, bank: Bank) -> None:
        """Delete snapshots whose checkpoints Ray has deleted since; never a reason to fail."""
        try:
            bank.prune(sorted(saved_steps(self._output)))
        except StorageError as error:
            self._tell(f"snapshots of the bank were left behind: {error}")

    def _tell(self, line: str) -> None:
        if not self._quiet:
            print(line, file=sys.stderr)

    def _open(
        self, samples: DataModule, streamed: bool
    ) -> tuple[ray.data.Dataset | None, StreamingSampler | None]:
        """Read all rows, or with a stream only those of the periodic judge."""
        title = "reading the rows to judge on" if streamed else "reading"
        look = rows_read(self._logbook, samples.num_read_first(streamed))
        with ProgressLine(title, look, quiet=self._quiet):
            lazy = samples.to_judge_on() if streamed else samples.all()
            decoded = None if lazy is None else lazy.materialize()
        return decoded, samples.stream() if streamed else None

    def _check_cluster(self, streamed: bool) -> None:
        """Refuse what the cluster could not place, if it does not grow."""
        config = self._config
        if config.gpu:
            have = accelerators(ray.cluster_resources())
            if not config.autoscaling:
                check_accelerator(config.accelerator, have)
            if config.precision == "bfloat16":
                check_bfloat16(have if config.accelerator is None else [config.accelerator])
        if not config.autoscaling:
            workers = max(config.worker_range(stage)[0] for stage in config.stages)
            check_resources(
                workers=workers,
                cpus_per_worker=cpus_of_a_worker(config, workers, streamed=streamed),
                gpu=config.gpu,
                spare_cpus=spare_cpus(streamed),
            )
            if line := crowding(workers):
                self._tell(line)

    def _warn_of_leakage(self, leakage: float) -> None:
        """Say what the probe found where the cure is not one for the negatives of a queue."""
        if self._config.batchnorm in ("as_is", "synchronized") and leakage > NOTABLE_LEAKAGE:
            self._tell(
                f"BatchNorm gives positives away: with shared statistics the pretext task is easier by {leakage:.3f}; "
                "set batchnorm to shuffled, group or layer"
            )

    def _conclude(self, final: dict[str, Any]) -> RunResult:
        self._warn_of_leakage(final.get("leakage", 0.0))
        rows = rows_in(self._logbook)
        steps, seconds = final.pop("step"), final.pop("seconds")
        result = RunResult(
            output=self._output.uri,
            steps=steps,
            epochs=final.pop("epoch"),
            seconds=seconds,
            samples_per_second=final.pop("samples") / max(seconds, 1e-9),
            final=final,
            broken_rows=dict(rows.broken),
            left_out=dict(rows.left_out),
            flat_images=rows.num_flat,
        )
        self._admission.lease.check()
        write_result(
            self._output, {"status": "finished", **{k: v for k, v in vars(result).items() if k != "output"}}
        )
        return result


def _result_of(error: RayclError | KeyboardInterrupt | SystemExit) -> dict[str, str]:
    """Return the result of a run that ended by an error, or by a signal that did not wait for a checkpoint."""
    if isinstance(error, KeyboardInterrupt | SystemExit):
        text = "the run was interrupted before it had saved; resume it from the last checkpoint with --resume"
        return {"status": "stopped", "error": text}
    return {"status": "stopped" if isinstance(error, StoppedError) else "failed", "error": str(error)}


def _blocks(decoded: ray.data.Dataset | None) -> list[Any]:
    return [] if decoded is None else decoded.to_arrow_refs()


def _bank_name(output: Place) -> str:
    """Return the last part of the output's address, without what a name may not have."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", output.name).lstrip("-._") or "bank"


def _written(least: int, most: int) -> int | str:
    """Return a number of workers as ``data.json`` holds it."""
    return most if least == most else f"{least}:{most}"
