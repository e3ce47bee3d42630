"""The heartbeat of a group of workers: how the driver knows that somebody is there who would save."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

EVERY_S = 5.0


@contextlib.contextmanager
def heartbeat(logbook: Any, *, every_s: float = EVERY_S) -> Iterator[None]:
    """Tell the logbook every ``every_s`` seconds that this process lives, whatever it is doing.

    From a thread of its own: a step, a judgment or a checkpoint may take longer than anybody waits.
    """
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(every_s):
            logbook.hear.remote()

    logbook.hear.remote()
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
