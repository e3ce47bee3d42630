"""A process that repeatedly writes to an output and fails if another process writes at the same time."""

import contextlib
import fcntl
import random
import sys
import time
import uuid
from pathlib import Path

from raycl import lease
from raycl.errors import ConfigError
from raycl.storage import Place


def main(output: str, referee: str, journal: str, *, elsewhere: bool, hold_s: float = 0.0) -> None:
    if elsewhere:  # as on separate machines: no process can see that another one has ended
        machine = uuid.uuid4().hex
        lease._machine = lambda: machine
        # S3 timestamps have a resolution of one second.
        lease.RENEW_S, lease.DEAD_S, lease.WATCH_S = 0.5, 4.0, 3.0
    while True:
        with (
            contextlib.suppress(ConfigError),
            lease.writing(Place(output)) as own,
            open(referee, "w") as file,
        ):
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                _note(journal, "two at once")
                sys.exit(3)
            _note(journal, "alone")
            time.sleep(hold_s or random.uniform(0.0, 0.3))
            own.check()
            fcntl.flock(file, fcntl.LOCK_UN)
        time.sleep(random.uniform(0.0, 0.1))


def _note(journal: str, text: str) -> None:
    with Path(journal).open("a") as file:
        file.write(f"{text}\n")


if __name__ == "__main__":
    main(*sys.argv[1:4], elsewhere=sys.argv[4] == "elsewhere", hold_s=float(sys.argv[5]))
