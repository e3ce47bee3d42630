"""Prepare the next items in a background thread while the current one is used."""

import contextlib
import queue
import threading
from collections.abc import Iterable, Iterator
from typing import Generic, Self, TypeVar, final

Item = TypeVar("Item")
_END = object()


@final
class Prefetched(Iterator[Item], Generic[Item]):
    """The items in order, prepared in a thread; up to ``depth`` items wait.

    An error is raised at the position of its item. The thread ends after its current item when this is closed or
    garbage collected.
    """

    def __init__(self, items: Iterable[Item], *, depth: int = 2) -> None:
        self._ready: queue.Queue[object] = queue.Queue(maxsize=depth)
        self._stopped = threading.Event()
        self._is_over = False
        # The thread holds no reference to this object, which could not be collected otherwise.
        work = (items, self._ready, self._stopped)
        threading.Thread(target=_prepare, args=work, name="raycl-prefetch", daemon=True).start()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        """Return the next item; raises the error of its preparation, and ``ValueError`` after ``close``."""
        if self._is_over:
            raise StopIteration
        item = self._ready.get()
        if self._stopped.is_set():
            raise ValueError("the items were closed while they were in use")
        if item is _END:
            self._is_over = True
            raise StopIteration
        if isinstance(item, _Failure):
            self._is_over = True
            raise item.error
        return item  # type: ignore[return-value]

    def close(self) -> None:
        """Stop preparing; a caller that waits for an item gets an error."""
        self._stopped.set()
        with contextlib.suppress(queue.Full):  # a full queue has no waiting caller
            self._ready.put_nowait(_END)

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
    except BaseException as error:  # the consumer raises it
        offer(_Failure(error))
