"""Prepare the next items in a background thread while the present one is used."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import TypeVar

Item = TypeVar("Item")
_END = object()


def prefetch(items: Iterable[Item], *, depth: int = 2) -> Iterator[Item]:
    """Yield the items in order; up to ``depth`` wait ready. An error comes where it would have."""
    ready: queue.Queue[object] = queue.Queue(maxsize=depth)
    stopped = threading.Event()

    def offer(item: object) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                offer(item)
                if stopped.is_set():
                    return
            offer(_END)
        except BaseException as error:  # handed to the consumer, whatever it is
            offer(_Failure(error))

    threading.Thread(target=work, name="raycl-prefetch", daemon=True).start()
    try:
        while (item := ready.get()) is not _END:
            if isinstance(item, _Failure):
                raise item.error
            yield item  # type: ignore[misc]
    finally:
        stopped.set()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error
