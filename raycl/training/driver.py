"""The driver of a run: successive groups of workers, their resources, and signals."""

import contextlib
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from functools import partial
from typing import Any, Self, final

import ray
from ray.exceptions import RayError
from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
from ray.train import RunConfig as TrainRunConfig

from raycl.config import RunConfig
from raycl.config.schema import PoolConfig
from raycl.errors import DataError, RunError, ShardAwayError, StoppedError, StorageError, last_line
from raycl.gpus import accelerators, check_accelerator, check_bfloat16
from raycl.progress import WAITING_S, ProgressLine, notices_of, steps_made
from raycl.ray_runtime import check_resources, cpus_for_a_worker, crowding, find_raycl_error, is_own_ray
from raycl.records import (
    CHECKPOINTS,
    complete_checkpoints,
    read_metrics,
    repair_manifest,
    reported_failures,
    wall_seconds,
    write_result,
)
from raycl.storage import Place
from raycl.training.checkpoint import SCORE, resume_order
from raycl.training.controller import (
    Finished,
    Outcome,
    RayTrainer,
    ResizeRequested,
    Stopped,
    remove_leaked_placement_groups,
)
from raycl.training.encoder_pool import EncoderPool, start_pool
from raycl.training.job import Failure, Job
from raycl.training.key_encoders import KeyEncoder
from raycl.training.loop import run_worker
from raycl.training.pools import check_pools, pools_of
from raycl.training.process import environment
from raycl.training.standby import importing

Printer = Callable[[str], None]

_ANSWER_S = 10.0
_LIMIT_S = 10.0  # between two looks at the nodes for pools: Ray Train also replaces and resizes groups
_NO_HEARTBEAT_S = 45.0  # after which no worker is left to save a checkpoint


def train_in_groups(
    job: Job, shutdown: "GracefulShutdown", report: Printer, *, quiet: bool
) -> dict[str, Any]:
    """Train to the end with successive groups of workers; return the last metrics.

    Each group resumes from the checkpoint of the one before: for a stage with other numbers of workers, and
    after the loss of a process, a node or Ray Train's controller. ``max_failures`` groups in a row may be lost
    without a new checkpoint. raycl's own errors are raised at once, since they would repeat, except that a shard of
    the bank is away. Raises ``StoppedError`` if a stop was requested.
    """
    workers, num_failures, started = job.workers_at(0), 0, time.time()
    job = replace(job, began=started - wall_seconds(job.output))
    saved = set[str]()  # the names of all checkpoints so far
    waiting = f"no worker has answered for {WAITING_S:.0f} s: Ray waits for nodes with room for the workers; see `ray status`"
    notices = notices_of(job.coordinator, when_waiting=waiting)
    report("starting the workers")
    with (
        _open_pool(job) as pool,
        ProgressLine("training", steps_made(job.coordinator), notices=notices, quiet=quiet),
    ):
        job = replace(job, encoder_pool=pool)
        while True:
            try:
                outcome = _train_group(replace(job, workers=workers), report)
            except Exception as error:
                # Even if the run ends: other code in a notebook needs the resources.
                with contextlib.suppress(Exception):
                    remove_leaked_placement_groups()
                # Any new checkpoint is progress, also one below a step that was rolled back.
                new = _saved(job.output) - saved
                saved |= new
                num_failures = 1 if new else num_failures + 1
                repeats = not isinstance(find_raycl_error(error), ShardAwayError | None)
                if repeats or num_failures > job.config.max_failures:
                    raise
                failures = f"failure {num_failures} of {job.config.max_failures}"
                step = max(map(resume_order, saved), default=(0, 0, 0))[1]
                report(f"{last_line(error)}: resuming from step {step} ({failures})")
                job = replace(job, failure=_failure(job, last_line(error), started=started))
                continue
            match outcome:
                case Finished(metrics):
                    return metrics
                case ResizeRequested(min_workers, max_workers):
                    workers = min_workers, max_workers
                case Stopped(step):
                    raise StoppedError(
                        f"the run was stopped after step {step}, which is saved; continue it with --resume",
                        shutdown.last_signal,
                    )


def _saved(output: Place) -> set[str]:
    """Return the names of the complete checkpoints; none if their list is truncated, until the next group repairs it."""
    with contextlib.suppress(StorageError):
        return set(complete_checkpoints(output))
    return set()


def _failure(job: Job, text: str, *, started: float) -> Failure:
    """Return the failure of the last group; one that made no step continues the failure before it.

    ``started`` is when this driver started to train.
    """
    try:
        last: dict[str, Any] = ray.get(job.coordinator.progress.remote(), timeout=_ANSWER_S)
    except RayError:
        last = {}
    if "time" not in last:  # the coordinator died, too
        last = _last_line(job.output, since=started)
    seen, earlier = last.get("time", started), job.failure
    if earlier is not None and seen <= earlier.time:
        if not _is_reported(earlier, job.output):
            return replace(earlier, text=f"{earlier.text}; {text}")
        # The group made a step, and a restarted coordinator does not know of it.
        seen = time.time()
    return Failure(
        text=text,
        step=last.get("step", 0),
        seconds=last.get("seconds", 0.0),
        time=seen,
        number=1 if earlier is None else earlier.number + 1,
        after_s=max(0.0, time.time() - started),
    )


def _last_line(output: Place, *, since: float) -> dict[str, Any]:
    """Return the last line of the log; nothing if it is older or cannot be read."""
    with contextlib.suppress(DataError, StorageError):
        for line in read_metrics(output)[-1:]:
            return line if (line.get("time") or 0) >= since else {}
    return {}


def _is_reported(failure: Failure, output: Place) -> bool:
    """Whether the log has a line about this failure; not if it cannot be read."""
    with contextlib.suppress(DataError, StorageError):
        return int(failure.time) in reported_failures(output)
    return False


def _train_group(job: Job, report: Printer) -> Outcome:
    """Run ``run_worker`` on one group of workers."""
    job.check_lease()
    if repair := repair_manifest(job.output):
        report(repair)
    config, is_streamed = job.config, job.stream is not None
    min_workers, max_workers = workers_that_fit(config, job.workers, streamed=is_streamed)
    cpus = cpus_of_a_worker(config, min_workers, streamed=is_streamed)
    _limit_pools(job)
    filesystem, path = job.output.resolve()
    trainer = RayTrainer(
        run_worker,
        began=job.began,
        pools=job.pools,
        requests_resources=is_streamed or min_workers < max_workers or config.autoscaling or not is_own_ray(),
        run_id=uuid.uuid5(uuid.NAMESPACE_URL, job.output.uri).hex,
        # By reference: the controller would import all modules of the workers.
        train_loop_config={"job": ray.put(job)},
        scaling_config=ScalingConfig(
            num_workers=max_workers if min_workers == max_workers else (min_workers, max_workers),
            use_gpu=config.gpu,
            accelerator_type=config.accelerator,
            resources_per_worker={"CPU": cpus} | ({"GPU": 1} if config.gpu else {}),
        ),
        run_config=TrainRunConfig(
            name=CHECKPOINTS,
            storage_path=path,
            storage_filesystem=filesystem,
            checkpoint_config=CheckpointConfig(
                num_to_keep=config.checkpoints.keep,
                checkpoint_score_attribute=SCORE,
                checkpoint_score_order="max",
            ),
            # The driver replaces lost groups; Ray Train replaces groups of nodes preempted with notice.
            failure_config=FailureConfig(max_failures=0, max_preemption_failures=-1),
            worker_runtime_env={"env_vars": environment(gpu=config.gpu) | importing("import_worker")},
        ),
    )
    outcome: Any = _in_thread(trainer.fit, meanwhile=partial(_limit_pools, job)).return_value
    if outcome is None:
        raise RunError("the run ended without a result; --debug shows the full error")
    return outcome


def _limit_pools(job: Job) -> None:
    """Limit the pools to the resources that workers and data tasks leave on the current nodes."""
    config, pools = job.config, (job.encoder_pool, job.mining_pool)
    for pool, settings in zip(pools, (config.momentum_encoder, config.negatives.mined), strict=True):
        if pool is not None:
            _, most = encoders_that_fit(config, settings, streamed=job.stream is not None)
            pool.actor.limit.remote(most)


@contextlib.contextmanager
def _open_pool(job: Job) -> Iterator[EncoderPool | None]:
    """Start the pool of actors that encodes keys, if configured, and stop it afterwards."""
    config = job.config
    if not config.uses_key_pool:
        yield None
        return
    settings, coordinator = config.momentum_encoder, job.coordinator
    build = partial(KeyEncoder, config, job.vocabulary, job.network)
    actors = encoders_that_fit(config, settings, streamed=job.stream is not None)
    with start_pool(build, settings, lambda text: coordinator.add_notice.remote(text), actors=actors) as pool:
        yield pool


def check_cluster(config: RunConfig, *, streamed: bool, report: Printer) -> None:
    """Raise ``ConfigError`` if the cluster has too few resources for the workers and cannot grow."""
    if config.gpu:
        available = accelerators(ray.cluster_resources())
        if not config.autoscaling:
            check_accelerator(config.accelerator, available)
        if config.precision == "bfloat16":
            check_bfloat16(available if config.accelerator is None else [config.accelerator])
    if config.autoscaling:
        return
    workers = max(config.worker_range(stage)[0] for stage in config.stages)
    check_pools(config, workers=workers)
    remedies = [f"lower {name}.cpus_per_actor" for name in pools_of(config)]
    check_resources(
        workers=workers,
        cpus_per_worker=cpus_of_a_worker(config, workers, streamed=streamed),
        gpu=config.gpu,
        spare_cpus=spare_cpus(config, streamed=streamed),
        remedies=[*remedies, "set data.cache=materialize"] if streamed else remedies,
    )
    if warning := crowding(workers):
        report(warning)


def cpus_of_a_worker(config: RunConfig, workers: int, *, streamed: bool) -> float:
    """Return the CPUs that each worker requests: one if the cluster can grow."""
    if config.cpus_per_worker is not None:
        return config.cpus_per_worker
    if config.autoscaling:
        return 1.0
    return cpus_for_a_worker(workers=workers, spare_cpus=spare_cpus(config, streamed=streamed))


def workers_that_fit(config: RunConfig, workers: tuple[int, int], *, streamed: bool) -> tuple[int, int]:
    """Return the minimum and maximum number of workers to request, with CPUs and GPUs left for data tasks and encoders.

    On a cluster that cannot grow, Ray Train would take every CPU and GPU for workers.
    """
    min_workers, max_workers = workers
    if min_workers == max_workers or config.autoscaling:
        return workers
    have, num_fitting = ray.cluster_resources(), max_workers
    if spare := spare_cpus(config, streamed=streamed):
        cpus = cpus_of_a_worker(config, min_workers, streamed=streamed)
        num_fitting = min(num_fitting, int((have.get("CPU", 0.0) - spare) / cpus + 1e-6))
    if config.gpu and (spare := _spare_gpus(config)):
        num_fitting = min(num_fitting, int(have.get("GPU", 0.0) - spare + 1e-6))
    return min_workers, max(min_workers, num_fitting)


def spare_cpus(config: RunConfig, *, streamed: bool) -> float:
    """Return the CPUs that data tasks and the fewest encoders of all pools need during training."""
    pools = pools_of(config).values()
    return float(streamed) + sum(pool.actor_range[0] * pool.cpus_per_actor for pool in pools)


def _spare_gpus(config: RunConfig) -> float:
    """Return the GPUs that the fewest encoders of all pools need during training."""
    return sum(pool.actor_range[0] * pool.gpus_per_actor for pool in pools_of(config).values())


def encoders_that_fit(config: RunConfig, pool: PoolConfig, *, streamed: bool) -> tuple[int, int]:
    """Return the fewest and the most encoders of the run's pool, with CPUs left for workers and data tasks.

    On a cluster that cannot grow, an encoder that waits for CPUs could take the CPUs of a data task.
    """
    least, most = pool.actor_range
    if config.autoscaling:
        return least, most
    have = ray.cluster_resources()
    groups = [
        workers_that_fit(config, config.worker_range(stage), streamed=streamed) for stage in config.stages
    ]
    num_cpus = have.get("CPU", 0.0) - float(streamed)
    num_cpus -= max(high * cpus_of_a_worker(config, low, streamed=streamed) for low, high in groups)
    num_fitting = int(num_cpus / pool.cpus_per_actor + 1e-6)
    if pool.gpus_per_actor:
        num_gpus = have.get("GPU", 0.0) - max(high for _, high in groups) * config.gpu
        num_fitting = min(num_fitting, int(num_gpus / pool.gpus_per_actor + 1e-6))
    return least, max(least, min(most, num_fitting))


@final
class GracefulShutdown:
    """On the first SIGTERM or Ctrl-C, request a checkpoint and a stop; on the second one, end the process.

    The process also ends if no worker sends a heartbeat any more, as in a group that waits for its nodes.
    Signals are handled from ``begin`` on, when workers exist, and ignored from ``end`` on, while the result is
    written. ``check`` is called before this class writes a result, and may raise ``RunError``.
    """

    def __init__(self, coordinator: Any, output: Place, check: Callable[[], object] = lambda: None) -> None:
        self._coordinator, self._output, self._check = coordinator, output, check
        self.last_signal: int = signal.SIGTERM
        self._handlers: dict[int, Any] = {}
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread handles signals
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        # A shell makes background processes ignore Ctrl-C: keep that.
        self._handlers = {
            each: handler for each, handler in handlers.items() if handler is not signal.SIG_IGN
        }
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._restore_handlers()

    def begin(self) -> None:
        """Handle signals from now on."""
        for each in self._handlers:
            signal.signal(each, self._handle)

    def end(self) -> None:
        """Ignore signals from now on, and request no more stops."""
        for each in self._handlers:
            signal.signal(each, signal.SIG_IGN)
        self._ended.set()
        if self._thread is not None:
            # A call after Ray has ended would start another Ray; a call that hangs must not block the end.
            self._thread.join(2 * _ANSWER_S + 5.0)

    def request_stop(self) -> float:
        """Request a stop of the workers; return the seconds since their last heartbeat.

        The request is repeated, since a coordinator that died with it may have been restarted.
        """
        try:
            ray.get(self._coordinator.request_stop.remote(), timeout=_ANSWER_S)
            return float(ray.get(self._coordinator.seconds_since_heartbeat.remote(), timeout=_ANSWER_S))
        except RayError:
            return 0.0

    def _restore_handlers(self) -> None:
        for each, handler in self._handlers.items():
            signal.signal(each, handler)

    def _handle(self, signum: int, _: object) -> None:
        self.last_signal = signum
        self._restore_handlers()
        # Not in the handler itself: it may have interrupted a call of Ray.
        self._thread = threading.Thread(target=self._wait_for_stop, daemon=True)
        self._thread.start()

    def _wait_for_stop(self) -> None:
        message = "raycl: saving a checkpoint and stopping; press Ctrl-C again to quit now"
        print(message, file=sys.stderr, flush=True)
        while self.request_stop() < _NO_HEARTBEAT_S:
            if self._ended.wait(2.0):
                return
        error = "the run was stopped without a worker to save it; resume the last checkpoint with --resume"
        with contextlib.suppress(StorageError, RunError):
            self._check()
            write_result(self._output, {"status": "stopped", "error": error})
        print(f"raycl: {error}", file=sys.stderr, flush=True)
        os._exit(128 + self.last_signal)  # the group would wait for its nodes forever


def _in_thread(work: Callable[[], Any], meanwhile: Callable[[], object]) -> Any:
    """Run ``work`` in another thread and return its result; call ``meanwhile`` every few seconds.

    In the main thread, Ray Train would handle Ctrl-C itself and end without a message or a checkpoint.
    """
    done: Future[Any] = Future()

    def perform() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # A daemon: an interrupted process must not wait for the end of the run.
    threading.Thread(target=perform, name="fit", daemon=True).start()
    while not wait([done], _LIMIT_S).done:
        with contextlib.suppress(Exception):  # as while Ray's head restarts; the next call may succeed
            meanwhile()
    return done.result()
