"""Run functions in connected processes, which start once and are reused."""

import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

_TIMEOUT_S = 120

# Processes fork from a server that has already imported what the tests import: 0.2 s each instead of 10 s.
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    ["pytest", "raycl.training.loop", "raycl.training.stores", "raycl.models.build", "tests.pairs"]
)


def run_workers(fn: Callable[..., Any], num_workers: int, *args: Any) -> list[Any]:
    """Run ``fn(rank, num_workers, *args)`` in processes that share a gloo process group.

    Later calls reuse the processes, unless one of them failed.

    Args:
        fn: A function at the top of an importable module.
        num_workers: The number of processes.
        args: Further arguments, which must be picklable.

    Returns:
        The return values of the workers, by rank.

    Raises:
        BaseException: The first error of a worker, with its rank and traceback as a note.
        TimeoutError: Not all had finished after 120 s.
        RuntimeError: A worker ended without an answer.
    """
    group = _groups.get(num_workers) or _Group(num_workers)
    _groups[num_workers] = group
    try:
        return group.run(fn, args)
    except BaseException:
        # The others may wait forever for the failed worker.
        del _groups[num_workers]
        group.kill()
        raise


class _Group:
    """Connected processes that wait for work."""

    def __init__(self, num_workers: int) -> None:
        with tempfile.TemporaryDirectory() as directory:
            meeting = Path(directory, "meeting").as_uri()
            started = [_start(rank, num_workers, meeting) for rank in range(num_workers)]
            self._processes, self._connections = zip(*started, strict=True)
            self._answers()  # each reports that it has joined the group

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> list[Any]:
        # Bytes, not objects: torch would send tensors through shared memory that is freed with the sender.
        task = pickle.dumps((fn, args))
        for connection in self._connections:
            connection.send_bytes(task)
        return self._answers()

    def kill(self) -> None:
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
            process.join()

    def _answers(self) -> list[Any]:
        deadline = time.monotonic() + _TIMEOUT_S
        answers: dict[Any, Any] = {}
        while len(answers) < len(self._connections):
            silent = [each for each in self._connections if each not in answers]
            ready = wait(silent, timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"workers had not finished after {_TIMEOUT_S} s")
            answers.update((connection, _receive(connection)) for connection in ready)
        return [answers[connection] for connection in self._connections]


_groups: dict[int, _Group] = {}


def _start(rank: int, num_workers: int, meeting: str) -> tuple[Any, Connection]:
    ours, theirs = _CONTEXT.Pipe()
    # Daemonic processes end with the tests.
    process = _CONTEXT.Process(target=_serve, args=(rank, num_workers, meeting, theirs), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def _receive(connection: Any) -> Any:
    try:
        succeeded, answer = pickle.loads(connection.recv_bytes())
    except (EOFError, ConnectionError):
        raise RuntimeError("a worker ended without a word") from None
    if not succeeded:
        raise answer
    return answer


def _serve(rank: int, num_workers: int, meeting: str, connection: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_workers)
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            task = connection.recv_bytes()
        except (EOFError, ConnectionError):  # the tests are over
            return
        connection.send_bytes(_perform(task, rank, num_workers))


def _perform(task: bytes, rank: int, num_workers: int) -> bytes:
    try:
        fn, args = pickle.loads(task)
        return pickle.dumps((True, fn(rank, num_workers, *args)))
    except BaseException as error:
        error.add_note(f"in worker {rank}:\n{traceback.format_exc()}")
        return _dump_error(error)


def _dump_error(error: BaseException) -> bytes:
    try:
        answer = pickle.dumps((False, error))
        pickle.loads(answer)
        return answer
    except Exception:
        text = "\n".join([repr(error), *error.__notes__])
        return pickle.dumps((False, RuntimeError(text)))
