"""The heartbeat of a group of workers: the driver hears that they live, and they hear that they are to stop."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError

EVERY_S = 1.0
_PATIENCE_S = 10.0


@contextlib.contextmanager
def heartbeat(logbook: Any, *, every_s: float = EVERY_S) -> Iterator[threading.Event]:
    """Tell the logbook every ``every_s`` seconds that this process lives; yield an event that a wish to stop sets.

    From a thread of its own: a step, a judgment or a checkpoint may take longer than anybody waits.
    """
    ended, asked_to_stop = threading.Event(), threading.Event()

    def beat() -> None:
        while True:
            # A logbook that died comes back, and is asked again.
            with contextlib.suppress(RayActorError, GetTimeoutError):
                if ray.get(logbook.hear.remote(), timeout=_PATIENCE_S):
                    asked_to_stop.set()
            if ended.wait(every_s):
                return

    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield asked_to_stop
    finally:
        ended.set()
        thread.join()
