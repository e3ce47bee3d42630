"""From a configuration to a finished run: check, read, train, record."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import ray
from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
from ray.train import RunConfig as TrainRunConfig
from ray.train.torch import TorchTrainer
from torch import nn

from raycl.cluster import (
    check_resources,
    cpus_for_a_worker,
    join_cluster,
    object_store_bytes,
    own_error,
    threads_per_worker,
)
from raycl.config import RunConfig, config_to_yaml
from raycl.data.decode import Decoder, Keep, decode_dataset, decode_source
from raycl.data.holdout import Holdout, hold_out
from raycl.data.logbook import ReadRows, start_logbook
from raycl.data.sources import Piece, Source, find_source
from raycl.data.stream import Stream, stream_dataset, stream_source
from raycl.errors import ConfigError, DataError, RayclError, RunError
from raycl.progress import ProgressLine, rows_read, steps_made
from raycl.records import write_result
from raycl.storage import Place
from raycl.training import build
from raycl.training.loop import Job, run_worker

CONFIG = "config.yaml"
CHECKPOINTS = "checkpoints"
JUDGED_PART = 20  # of a large set, one row in so many is judged on


@final
@dataclass(frozen=True, kw_only=True)
class RunResult:
    """What came of a run: where it lies, how long it took, its last metrics, and broken rows."""

    output: str
    steps: int
    epochs: int
    seconds: float
    samples_per_second: float
    final: dict[str, Any]
    broken_rows: dict[str, int]


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
    """Pretrain an encoder on the images at ``data`` or in a Ray Dataset, and write it to ``output``.

    ``encoder`` may be a module of your own that maps [batch, channels, size, size] to
    [batch, dim]. Raises ``ConfigError``, ``DataError`` or ``StorageError`` before anything starts,
    ``RunError`` if the run fails later.
    """
    if (data is None) == (dataset is None):
        raise ConfigError("give exactly one of data (an address) and dataset (a Ray Dataset)")
    place = _prepare_output(output, resume=resume)
    source = None if data is None else find_source(_absolute(data), build.column_names(config))
    if source is not None:
        _check_size(config, source.num_rows)
    build.augmentation(config)  # an impossible view or encoder is found here, not on the workers
    if encoder is None:
        build.tower(config, build.encoder(config))
    join_cluster(address, debug=debug)
    try:
        return _Launch(config, place, encoder, quiet=quiet).run(source, dataset)
    except RayclError as error:
        _write_failure(place, error)
        raise
    except Exception as error:
        found = own_error(error) or RunError(
            f"the run failed: {_last_line(error)}; use --debug for the whole story"
        )
        _write_failure(place, found)
        raise found from error


@final
class _Images:
    """The images of a run, wherever they come from: how many, and how they are opened."""

    def __init__(
        self, config: RunConfig, logbook: Any, source: Source | None, dataset: ray.data.Dataset | None
    ) -> None:
        self._config, self._logbook, self._source, self._dataset = config, logbook, source, dataset
        self.num_rows: int = source.num_rows if source is not None else dataset.count()  # type: ignore[union-attr]
        self.holdout = self._hold_out()

    @property
    def has_labels(self) -> bool:
        if self._source is not None:
            return self._source.has_labels
        return (self._config.data.columns.label or "label") in self._dataset.schema().names  # type: ignore[union-attr]

    def must_stream(self) -> bool:
        """Whether the decoded rows are too many for half of a node's object store."""
        data = self._config.data
        if data.cache != "auto":
            return data.cache == "stream"
        return self.num_rows * data.channels * data.decoded_size**2 > object_store_bytes() / 2

    def num_train_expected(self) -> int:
        return round(self.num_rows * (1.0 - self.holdout.test))

    def num_read_first(self, streamed: bool) -> int:
        return (
            sum(piece.num_rows for piece in self._judged_pieces())
            if streamed and self._source
            else self.num_rows
        )

    def all(self) -> ray.data.Dataset:
        return self._decode(self._decoder())

    def to_judge_on(self) -> ray.data.Dataset | None:
        if self.holdout.test == 0 or not self.has_labels:
            return None
        return self._decode(self._decoder(self.holdout.is_judged), self._judged_pieces())

    def stream(self) -> Stream:
        decoder, seed = self._decoder(self.holdout.is_train), self._config.seed
        opened = (
            stream_source(self._source, decoder, seed=seed)
            if self._source is not None
            else stream_dataset(self._dataset, self._config.data.columns, decoder, seed=seed)  # type: ignore[arg-type]
        )
        return Stream(
            open_epoch=opened,
            image_format=decoder.image_format,
            seed=seed,
            shuffle_rows=self._config.data.shuffle_rows,
        )

    def _decode(self, decoder: Decoder, pieces: tuple[Piece, ...] | None = None) -> ray.data.Dataset:
        if self._source is not None:
            return decode_source(self._source, decoder, pieces)
        return decode_dataset(self._dataset, self._config.data.columns, decoder)  # type: ignore[arg-type]

    def _decoder(self, keep: Keep | None = None) -> Decoder:
        return Decoder(
            image_format=build.image_format(self._config),
            logbook=self._logbook,
            holdout=self.holdout,
            keep=keep,
        )

    def _hold_out(self) -> Holdout:
        settings = self._config.evaluation
        if settings.every_epochs == 0:
            return Holdout(seed=self._config.seed)
        num_rows = sum(piece.num_rows for piece in self._judged_pieces()) if self._source else self.num_rows
        return hold_out(
            num_rows, num_test=settings.num_test, num_train=settings.num_train, seed=self._config.seed
        )

    def _judged_pieces(self) -> tuple[Piece, ...]:
        """Return pieces spread over the set, enough to judge on: all of them, if it is not large."""
        pieces = self._source.pieces if self._source is not None else ()
        settings = self._config.evaluation
        enough = JUDGED_PART * (settings.num_test + settings.num_train)
        return pieces[:: max(1, self.num_rows // enough)]


@final
class _Launch:
    def __init__(self, config: RunConfig, output: Place, network: nn.Module | None, *, quiet: bool) -> None:
        self._config, self._output, self._network, self._quiet = config, output, network, quiet
        self._logbook = start_logbook()

    def run(self, source: Source | None, dataset: ray.data.Dataset | None) -> RunResult:
        images = _Images(self._config, self._logbook, source, dataset)
        _check_size(self._config, images.num_rows)
        streamed = images.must_stream()
        cpus = self._check_cluster(streamed)
        blocks, stream = self._open(images, streamed)
        rows: ReadRows = ray.get(self._logbook.rows.remote())
        rows.check(self._config.data.max_bad_fraction)
        num_train = images.num_train_expected() if streamed else rows.num_train
        _check_size(self._config, num_train)
        (self._output / CONFIG).write_text(config_to_yaml(self._config))
        job = Job(
            config=self._config,
            output=self._output,
            blocks=tuple(blocks),
            stream=stream,
            num_train=num_train,
            holdout=images.holdout,
            logbook=self._logbook,
            num_threads=threads_per_worker(workers=self._config.workers),
            judged=images.holdout.test > 0 and images.has_labels,
            network=self._network,
        )
        return self._conclude(self._fit(job, cpus))

    def _open(self, images: "_Images", streamed: bool) -> tuple[list[ray.ObjectRef], Stream | None]:
        """Read all rows, or with a stream only those of the periodic judge."""
        title = "reading the rows to judge on" if streamed else "reading"
        look = rows_read(self._logbook, images.num_read_first(streamed))
        with ProgressLine(title, look, quiet=self._quiet):
            decoded = images.to_judge_on() if streamed else images.all()
            blocks = decoded.materialize().to_arrow_refs() if decoded is not None else []
        return blocks, images.stream() if streamed else None

    def _check_cluster(self, streamed: bool) -> float:
        """Return the CPUs of a worker; tasks that read while training goes on need one of their own."""
        config = self._config
        spare = 1.0 if streamed else 0.0
        cpus = config.cpus_per_worker or cpus_for_a_worker(workers=config.workers, spare_cpus=spare)
        check_resources(workers=config.workers, cpus_per_worker=cpus, gpu=config.gpu, spare_cpus=spare)
        return cpus

    def _fit(self, job: Job, cpus: float) -> dict[str, Any]:
        filesystem, path = self._output.resolve()
        keep = CheckpointConfig(
            num_to_keep=self._config.checkpoints.keep,
            checkpoint_score_attribute="knn_top1" if job.judged else "step",
            checkpoint_score_order="max",
        )
        trainer = TorchTrainer(
            run_worker,
            train_loop_config={"job": job},
            scaling_config=ScalingConfig(
                num_workers=self._config.workers,
                use_gpu=self._config.gpu,
                resources_per_worker={"CPU": cpus} | ({"GPU": 1} if self._config.gpu else {}),
            ),
            run_config=TrainRunConfig(
                name=CHECKPOINTS,
                storage_path=path,
                storage_filesystem=filesystem,
                checkpoint_config=keep,
                failure_config=FailureConfig(max_failures=self._config.max_failures),
            ),
        )
        with ProgressLine("training", steps_made(self._logbook), quiet=self._quiet):
            result = trainer.fit()
        if result.return_value is None:
            raise RunError("the run ended without a result; use --debug for the whole story")
        return result.return_value

    def _conclude(self, final: dict[str, Any]) -> RunResult:
        rows: ReadRows = ray.get(self._logbook.rows.remote())
        steps, seconds = final.pop("step"), final.pop("seconds")
        result = RunResult(
            output=self._output.uri,
            steps=steps,
            epochs=final.pop("epoch"),
            seconds=seconds,
            samples_per_second=steps * self._config.stage.batch_size / max(seconds, 1e-9),
            final=final,
            broken_rows=dict(rows.broken),
        )
        write_result(
            self._output, {"status": "finished", **{k: v for k, v in vars(result).items() if k != "output"}}
        )
        return result


def _check_size(config: RunConfig, num_rows: int) -> None:
    batch_size = config.stage.batch_size
    if num_rows < batch_size:
        raise DataError(
            f"a batch of {batch_size} rows is larger than the {num_rows} rows to train on; "
            "lower --batch-size or give more data"
        )


def _prepare_output(output: str, *, resume: bool) -> Place:
    """Return the output's place; an earlier run there is continued only on request."""
    place = Place(_absolute(output))
    if (place / CONFIG).exists() and not resume:
        raise ConfigError(f"{output} holds an earlier run; give another --output, or --resume to continue it")
    place.check_writable()
    return place


def _absolute(uri: str) -> str:
    """Workers run in folders of their own."""
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


def _write_failure(output: Place, error: RayclError) -> None:
    write_result(output, {"status": "failed", "error": str(error), "time": time.time()})


def _last_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1].strip() if lines else type(error).__name__
