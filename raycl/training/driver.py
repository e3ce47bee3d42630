"""The groups of workers of a run, one after the other: for its stages, and after failures."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import replace
from typing import Any, Self, final

import ray
from ray.exceptions import GetTimeoutError, RayActorError
from ray.train import CheckpointConfig, FailureConfig, ScalingConfig
from ray.train import RunConfig as TrainRunConfig

from raycl.config import RunConfig
from raycl.errors import RunError, StoppedError, StorageError, last_line
from raycl.progress import ProgressLine, notices_of, steps_made
from raycl.ray_runtime import cpus_for_a_worker, find_raycl_error
from raycl.records import write_result
from raycl.storage import Place
from raycl.training.checkpoint import SCORE, saved_steps
from raycl.training.controller import Trainer, free_abandoned_room
from raycl.training.job import Finished, Job, Outcome, ResizeRequested, Stopped
from raycl.training.loop import run_worker
from raycl.training.process import environment
from raycl.training.resume import CHECKPOINTS, repair_manifest

_ANSWER_S = 10.0
_ALONE_S = 45.0  # without a heartbeat: nobody is there who would save


@final
class WorkerGroups:
    """Train with one group of workers after the other, each from the checkpoint of the one before."""

    def __init__(
        self,
        config: RunConfig,
        output: Place,
        logbook: Any,
        signals: "GracefulShutdown",
        tell: Callable[[str], None],
        *,
        quiet: bool,
    ) -> None:
        self._config, self._output, self._logbook = config, output, logbook
        self._signals, self._tell, self._quiet = signals, tell, quiet

    def train(self, job: Job) -> dict[str, Any]:
        """Train to the end; return the last metrics.

        A group that is lost (a process, a node, Ray Train's controller) is replaced, ``max_failures``
        times in a row without a new checkpoint between. Raises ``StoppedError`` if the run was asked to
        stop; raycl's own errors come out at once, since they would come again.
        """
        least, most = self._config.worker_range(self._config.stages[0])
        failures = _Failures(self._config.max_failures)
        notices = notices_of(self._logbook)
        with ProgressLine("training", steps_made(self._logbook), notices=notices, quiet=self._quiet):
            while True:
                try:
                    outcome = self._fit(replace(job, workers=(least, most)))
                except Exception as error:
                    # Whether the run goes on or not: in a notebook others want the room.
                    with contextlib.suppress(Exception):
                        free_abandoned_room()
                    saved = saved_steps(self._output)
                    if find_raycl_error(error) is not None or not failures.may_go_on(saved):
                        raise
                    last = max(saved, default=0)
                    self._tell(f"{last_line(error)}: going on from step {last} ({failures.count})")
                    continue
                match outcome:
                    case Finished(metrics):
                        return metrics
                    case ResizeRequested(least, most):
                        pass
                    case Stopped(step):
                        raise StoppedError(
                            f"the run was stopped after step {step}, which is saved; go on with --resume",
                            self._signals.last,
                        )

    def _fit(self, job: Job) -> Outcome:
        job.check_lease()
        if told := repair_manifest(self._output):
            self._tell(told)
        is_streamed = job.stream is not None
        least, most = workers_with_room(self._config, job.workers, streamed=is_streamed)
        cpus = cpus_of_a_worker(self._config, least, streamed=is_streamed)
        filesystem, path = self._output.resolve()
        keep = CheckpointConfig(
            num_to_keep=self._config.checkpoints.keep,
            checkpoint_score_attribute=SCORE,
            checkpoint_score_order="max",
        )
        trainer = Trainer(
            run_worker,
            # By reference: the controller would import all that the workers need.
            train_loop_config={"job": ray.put(job)},
            scaling_config=ScalingConfig(
                num_workers=most if least == most else (least, most),
                use_gpu=self._config.gpu,
                accelerator_type=self._config.accelerator,
                resources_per_worker={"CPU": cpus} | ({"GPU": 1} if self._config.gpu else {}),
            ),
            run_config=TrainRunConfig(
                name=CHECKPOINTS,
                storage_path=path,
                storage_filesystem=filesystem,
                checkpoint_config=keep,
                # Lost groups are replaced here; nodes that are taken away with notice, by Ray.
                failure_config=FailureConfig(max_failures=0, max_preemption_failures=-1),
                worker_runtime_env={"env_vars": environment(gpu=self._config.gpu)},
            ),
        )
        outcome: Any = _aside(trainer.fit).return_value
        if outcome is None:
            raise RunError("the run ended without a result; use --debug for the whole story")
        return outcome


@final
class _Failures:
    """How often in a row a group was lost before it had saved anything new."""

    def __init__(self, allowed: int) -> None:
        self._allowed, self._in_a_row = allowed, 0
        self._saved: Collection[int] = ()

    @property
    def count(self) -> str:
        return f"{self._in_a_row} of {self._allowed}"

    def may_go_on(self, saved: Collection[int]) -> bool:
        # Any new one is progress, also below what was rolled back or left half-written.
        self._in_a_row = 1 if set(saved) - set(self._saved) else self._in_a_row + 1
        self._saved = saved
        return self._in_a_row <= self._allowed


def cpus_of_a_worker(config: RunConfig, workers: int, *, streamed: bool) -> float:
    """Return the CPUs that each of so many workers asks for: of a cluster that will grow a whole one."""
    if config.cpus_per_worker is not None:
        return config.cpus_per_worker
    return 1.0 if config.autoscaling else cpus_for_a_worker(workers=workers, spare_cpus=spare_cpus(streamed))


def workers_with_room(config: RunConfig, workers: tuple[int, int], *, streamed: bool) -> tuple[int, int]:
    """Return how many workers to ask for at least and at most, so that the tasks that read have room too.

    Of a cluster that does not grow, Ray Train would take every CPU where fewer workers would do.
    """
    least, most = workers
    if least == most or not streamed or config.autoscaling:
        return workers
    cpus = cpus_of_a_worker(config, least, streamed=streamed)
    room = int((ray.cluster_resources().get("CPU", 0.0) - spare_cpus(streamed)) / cpus + 1e-6)
    return least, max(least, min(most, room))


def spare_cpus(streamed: bool) -> float:
    """Return what tasks need that read while training goes on."""
    return 1.0 if streamed else 0.0


@final
class GracefulShutdown:
    """Let the first SIGTERM or Ctrl-C ask the workers to save and end; a second one ends this process.

    So does the first after a while in which no worker was there: a group may wait for its nodes. This holds from
    ``begin`` on, while there are workers to ask. From ``end`` on signals are ignored: the result is written.
    ``check`` is called before this writes a result, and may raise ``RunError``.
    """

    def __init__(self, logbook: Any, output: Place, check: Callable[[], object] = lambda: None) -> None:
        self._logbook, self._output, self._check = logbook, output, check
        self.last: int = signal.SIGTERM  # that came
        self._before: dict[int, Any] = {}
        self._ended = threading.Event()
        self._asking: threading.Thread | None = None

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self  # signals are handled nowhere else
        handlers = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}
        # A shell lets what it starts in the background ignore Ctrl-C, and so it stays.
        self._before = {each: handler for each, handler in handlers.items() if handler is not signal.SIG_IGN}
        return self

    def __exit__(self, *_: object) -> None:
        self.end()
        self._handle_no_more()

    def begin(self) -> None:
        """Handle signals from here on: workers are about to train."""
        for each in self._before:
            signal.signal(each, self._ask)

    def end(self) -> None:
        """Ignore signals from here on, and ask no longer."""
        for each in self._before:
            signal.signal(each, signal.SIG_IGN)
        self._ended.set()
        if self._asking is not None:
            # A question after Ray has ended would start another Ray; one that hangs must not hold the end.
            self._asking.join(2 * _ANSWER_S + 5.0)

    def _handle_no_more(self) -> None:
        for each, handler in self._before.items():
            signal.signal(each, handler)

    def _ask(self, signum: int, _: object) -> None:
        self.last = signum
        self._handle_no_more()
        # Not from the handler itself: it may have interrupted Ray in the middle of a call.
        self._asking = threading.Thread(target=self._await_the_end, daemon=True)
        self._asking.start()

    def _await_the_end(self) -> None:
        print(
            "raycl: saving after this step, then ending; once more ends at once", file=sys.stderr, flush=True
        )
        while self.ask_to_stop() < _ALONE_S:
            if self._ended.wait(2.0):
                return
        error = "the run was stopped while no worker was there to save; go on from the last checkpoint with --resume"
        with contextlib.suppress(StorageError, RunError):
            self._check()
            write_result(self._output, {"status": "stopped", "error": error})
        print(f"raycl: {error}", file=sys.stderr, flush=True)
        os._exit(128 + self.last)  # the group would go on waiting for its nodes

    def ask_to_stop(self) -> float:
        """Ask the workers to stop, and return since when none was heard.

        Asked for again each time: the logbook may have died of it, and is soon there again.
        """
        try:
            ray.get(self._logbook.ask_to_stop.remote(), timeout=_ANSWER_S)
            return float(ray.get(self._logbook.seconds_alone.remote(), timeout=_ANSWER_S))
        except (RayActorError, GetTimeoutError):
            return 0.0


def _aside(work: Callable[[], Any]) -> Any:
    """Return what ``work`` does in a thread of its own.

    In the main thread Ray Train would answer Ctrl-C itself, by an end without a word and without a checkpoint.
    """
    done: Future[Any] = Future()

    def perform() -> None:
        try:
            done.set_result(work())
        except BaseException as error:
            done.set_exception(error)

    # A daemon, or a process that is interrupted would wait for the end of the run.
    threading.Thread(target=perform, name="fit", daemon=True).start()
    return done.result()
