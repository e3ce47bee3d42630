"""Ray Train's list of the checkpoints that are there whole, and a copy of it.

On a file system Ray writes the list in place: a controller that is ended in that moment leaves half of one, and no run
could go on from it. So the list is copied before each checkpoint, and the copy takes the place of one that was
cut. What that does not name yet is not gone on from: it is made again. An object store has no half files.
"""

import json
from pathlib import Path
from typing import Any

from raycl.storage import Place

CHECKPOINTS = "checkpoints"
LISTED = "checkpoint_manager_snapshot.json"
_COPY = "checkpoint_list.json"
_RESULTS, _LATEST, _NUMBERS = "checkpoint_results", "latest_checkpoint_result", "checkpoint_report_indices"
_NAME = "checkpoint_dir_name"


def copy_list(output: Place) -> None:
    """Keep a copy of the list as it is, if it is whole."""
    if output.is_local and (listed := _read(output / CHECKPOINTS / LISTED)) is not None:
        (output / CHECKPOINTS / _COPY).write_text(json.dumps(listed))


def mend_list(output: Place) -> bool:
    """Put the copy in the place of a list that was cut; whether it was.

    Without a copy there was only one checkpoint, which nobody has listed: the list goes, too.
    """
    place = output / CHECKPOINTS / LISTED
    if not (output.is_local and place.exists()) or _read(place) is not None:
        return False
    copy = _read(output / CHECKPOINTS / _COPY)
    if copy is None:
        Path(place.resolve()[1]).unlink()
    else:
        place.write_text(json.dumps(_of_those_that_exist(copy, output / CHECKPOINTS)))
    return True


def _read(place: Place) -> dict[str, Any] | None:
    """Return what lies there, None if it is not there or not whole."""
    if not place.exists():
        return None
    try:
        found = json.loads(place.read_text())
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def _of_those_that_exist(listed: dict[str, Any], folder: Place) -> dict[str, Any]:
    """Leave out checkpoints that were deleted after the copy was made."""
    numbers = listed.get(_NUMBERS) or range(len(listed[_RESULTS]))
    kept = [
        (result, number)
        for result, number in zip(listed[_RESULTS], numbers, strict=True)
        if (folder / result[_NAME]).exists()
    ]
    results = [result for result, _ in kept]
    latest = listed[_LATEST] if listed[_LATEST] in results else results[-1] if results else None
    return listed | {_RESULTS: results, _NUMBERS: [number for _, number in kept], _LATEST: latest}
