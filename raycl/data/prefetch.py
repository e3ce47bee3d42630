"""Prepare the next items in a background thread while the present one is used."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, Self, TypeVar, final

Item = TypeVar("Item")
_END = object()


@final
class Prefetched(Iterator[Item], Generic[Item]):
    """The items in order, prepared from now on; up to ``depth`` wait ready.

    An error comes where it would have. The thread ends with the items, and when this is closed or forgotten.
    """

    def __init__(self, items: Iterable[Item], *, depth: int = 2) -> None:
        self._ready: queue.Queue[object] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        # The thread does not know of this object, which could not be forgotten otherwise.
        work = (items, self._ready, self._stopped)
        threading.Thread(target=_prepare, args=work, name="raycl-prefetch", daemon=True).start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        if self._stopped.is_set():
            raise StopIteration
        item = self._ready.get()
        if item is _END:
            self.close()
            raise StopIteration
        if isinstance(item, _Failure):
            self.close()
            raise item.error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Let the thread end, whatever it has not prepared."""
        self._stopped.set()

    def __del__(self) -> None:
        self.close()


class _Failure:
    def __init__(self, error: BaseException) -> None:
        self.error = error


def _prepare(items: Iterable[object], ready: "queue.Queue[object]", stopped: threading.Event) -> None:
    def offer(item: object) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                ready.put(item, timeout=0.1)
                return

    try:
        for item in items:
            offer(item)
            if stopped.is_set():
                return
        offer(_END)
    except BaseException as error:  # handed to the consumer, whatever it is
        offer(_Failure(error))
