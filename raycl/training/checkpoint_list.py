"""Ray Train's list of the checkpoints that are there whole, and a copy of it.

On a file system Ray writes the list in place: a controller that is ended in that moment leaves half of one, and no run
could go on from it. So the list is copied before each checkpoint, and the copy takes the place of one that was
cut. What that does not name yet is not gone on from: it is made again. An object store has no half files.
"""

import json
from pathlib import Path
from typing import Any

from raycl.errors import StorageError
from raycl.storage import Place

CHECKPOINTS = "checkpoints"
LISTED = "checkpoint_manager_snapshot.json"
_COPY = "checkpoint_list.json"
_RESULTS, _LATEST, _NUMBERS = "checkpoint_results", "latest_checkpoint_result", "checkpoint_report_indices"
_NAME = "checkpoint_dir_name"


def backup_manifest(output: Place) -> None:
    """Keep a copy of the list as it is, if it is whole."""
    if output.is_local and (listed := _read(output / CHECKPOINTS / LISTED)) is not None:
        (output / CHECKPOINTS / _COPY).write_text(json.dumps(listed))


def repair_manifest(output: Place) -> str | None:
    """Put the copy in the place of a list that was cut; say what was done, if it was.

    Without a copy there should be one checkpoint at most, which nobody has listed: then the list goes.

    Raises:
        StorageError: The list was cut, and there are checkpoints and no copy.
    """
    folder = output / CHECKPOINTS
    place = folder / LISTED
    if not (output.is_local and place.exists()) or _read(place) is not None:
        return None
    copy = copied_list(folder)
    if copy is not None:
        place.write_text(json.dumps(copy))
        return "the list of checkpoints was cut in its writing: going on by the one before"
    if len({path.split("/")[0] for path, _ in folder.files() if "/" in path}) > 1:
        raise StorageError(
            f"{place} was cut in its writing, and there is no copy of it: move the folder {CHECKPOINTS} away to begin "
            "anew with --resume, or give another --output"
        )
    Path(place.resolve()[1]).unlink()
    return "the list of the first checkpoint was cut in its writing: beginning anew"


def copied_list(folder: Place) -> dict[str, Any] | None:
    """Return the copy of the list of checkpoints in ``folder``, of those that still exist; None without one."""
    copy = _read(folder / _COPY)
    return None if copy is None else _of_those_that_exist(copy, folder)


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
    # Results are in the order of their scores; numbers are in that of time.
    newest = max(kept, key=lambda pair: pair[1], default=(None, 0))[0]
    latest = listed[_LATEST] if listed[_LATEST] in results else newest
    return listed | {_RESULTS: results, _NUMBERS: [number for _, number in kept], _LATEST: latest}
