"""Where what was prepared is written."""

from raycl.errors import StorageError
from raycl.storage import Place, absolute


def new_folder(output: str) -> Place:
    """Return a place where nothing is yet; raises ``StorageError`` if there is something."""
    place = Place(absolute(output))
    if place.exists():
        raise StorageError(f"{output} exists already; give another --output or remove it")
    return place
