"""Small files of the doctor's own, beside an output: written, read and deleted by a task on each node."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from raycl.errors import RayclError
from raycl.storage import Place


@final
@dataclass(frozen=True)
class Written:
    """What went wrong with writing, if anything; the folders that had to be made for the file."""

    problem: str = ""
    made: tuple[str, ...] = ()


def parent_of(place: Place) -> Place:
    """Return what an output lies in: a folder, a prefix or a bucket."""
    if place.is_local:
        return Place(str(Path(place.root).parent))
    address, mark, options = place.root.partition("?")
    scheme, _, path = address.partition("://")
    parent = path.rstrip("/").rpartition("/")[0] or path
    return Place(f"{scheme}://{parent}{mark}{options}")


def write(folder: Place, file: str) -> Written:
    """Write a small file that holds its own name."""
    missing = _missing_folders(folder)
    try:
        (folder / file).write_bytes(file.encode())
    except RayclError as error:
        remove_folders(missing)
        return Written(problem=str(error))
    return Written(made=missing)


def read(folder: Place, files: Sequence[str]) -> dict[str, str]:
    """Return what is wrong with each of these files; nothing, where all are seen as they were written."""
    problems = {}
    for file in files:
        place = folder / file
        try:
            if not place.exists():
                problems[file] = "does not see"
            elif place.read_bytes() != file.encode():
                problems[file] = "sees other bytes in"
        except RayclError as error:
            problems[file] = f"{error}:"
    return problems


def delete(folder: Place, file: str) -> str:
    """Delete a file if it is there; return what went wrong."""
    place = folder / file
    try:
        if place.exists():
            filesystem, path = place.resolve()
            with place.explaining("delete"):
                filesystem.delete_file(path)
    except RayclError as error:
        return str(error)
    return ""


def remove_folders(folders: Sequence[str]) -> None:
    """Remove those of these local folders that are there and empty, the deepest first."""
    for folder in folders:
        try:
            Path(folder).rmdir()
        except OSError:
            return  # another one's by now, or gone already


def _missing_folders(folder: Place) -> tuple[str, ...]:
    if not folder.is_local:
        return ()
    path = Path(folder.root)
    return tuple(str(each) for each in (path, *path.parents) if not each.exists())
