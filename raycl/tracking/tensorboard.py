"""TensorBoard's event files below a run's output, local or on S3."""

import re
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import final

from tensorboardX import RecordWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog  # pyright: ignore[reportAttributeAccessIssue]
from tensorboardX.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]

from raycl.storage import Place
from raycl.tracking.base import MetricsRecord

# An object store cannot append, so each flush writes the whole file: keep it small.
MAX_BYTES = 2**20

_NAME = re.compile(r"events\.out\.tfevents\.(\d+)\.raycl")


@final
class EventFiles:
    """Write one scalar per metric and step.

    A resumed run writes a file of its own, which starts by discarding later steps of earlier files.
    """

    def __init__(self, folder: Place, *, resume_step: int = 0) -> None:
        """Write below ``folder``, after its existing files; raises ``StorageError``."""
        self._folder = folder
        self._staging = None if folder.is_local else tempfile.TemporaryDirectory(prefix="raycl-")
        self._local = Path(self._staging.name if self._staging else folder.resolve()[1])
        self._local.mkdir(parents=True, exist_ok=True)
        names = [path for path, _ in folder.files()] if folder.exists() else []
        # Numbered, not dated: TensorBoard reads files in the order of their names, and the clock of the
        # next node may be behind.
        self._number = max((int(match[1]) for name in names if (match := _NAME.fullmatch(name))), default=-1)
        self._begin_file()
        if names:
            self._discard_after(resume_step)

    def write(self, records: Sequence[MetricsRecord]) -> None:
        """Add the records to the file."""
        for record in records:
            if record.is_rollback:
                self._discard_after(record.step)
                continue
            values = [Summary.Value(tag=name, simple_value=value) for name, value in record.metrics.items()]
            self._add(Event(wall_time=record.time, step=record.step, summary=Summary(value=values)))

    def flush(self) -> None:
        """Write the file to the folder; raises ``StorageError``."""
        self._file.flush()
        if self._staging is None:
            return
        content = (self._local / self._name).read_bytes()
        (self._folder / self._name).write_bytes(content)
        if len(content) > MAX_BYTES:
            self._file.close()
            self._begin_file()

    def close(self, *, finished: bool) -> None:
        """Write the file for the last time."""
        self.flush()
        self._file.close()
        if self._staging is not None:
            self._staging.cleanup()

    @property
    def _name(self) -> str:
        return f"events.out.tfevents.{self._number:010d}.raycl"

    def _begin_file(self) -> None:
        self._number += 1
        self._file = RecordWriter(str(self._local / self._name))
        self._add(Event(wall_time=time.time(), file_version="brain.Event:2"))

    def _discard_after(self, step: int) -> None:
        start = SessionLog(status=SessionLog.START)
        self._add(Event(wall_time=time.time(), step=step + 1, session_log=start))

    def _add(self, event: Event) -> None:
        self._file.write(event.SerializeToString())
