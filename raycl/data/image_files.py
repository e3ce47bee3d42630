"""Read image files from a folder, or from the paths in an image column of Hugging Face ``datasets``."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from raycl.data.images import BrokenImageError
from raycl.errors import StorageError
from raycl.storage import Place

# A path in a dataset must not choose an endpoint ("?") or bring a key ("@").
_ABSOLUTE = re.compile(r"(s3://[A-Za-z0-9._-]+|)/(.+)", re.DOTALL)
_BYTES = (pa.null(), pa.binary(), pa.large_binary())
_PATHS = (pa.null(), pa.string(), pa.large_string())


def is_image_struct(kind: pa.DataType) -> bool:
    """Whether a column holds images in the format of Hugging Face ``datasets``: ``{bytes, path}``."""
    if not isinstance(kind, pa.StructType):
        return False
    types = {field.name: field.type for field in kind}
    return types.get("bytes") in _BYTES and types.get("path") in _PATHS


def read_image(place: Place) -> bytes | BrokenImageError:
    """Return the content of a file, or its error; raises ``StorageError`` for a failure of the storage.

    S3 denies access per role, not per file, so a denial stops the run and does not count as one invalid row.
    """
    try:
        return place.read_bytes()
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | PermissionError):
            is_missing = isinstance(error.__cause__, FileNotFoundError)
            return BrokenImageError("file not found" if is_missing else "no permission to read the file")
        raise


def struct_images(column: pa.ChunkedArray) -> list[bytes | BrokenImageError | None]:
    """Return the bytes of an image column of structs; an image without bytes is read from its path."""
    fields = dict(zip((field.name for field in column.type), column.flatten(), strict=True))
    names = fields["path"].cast(pa.binary()).to_pylist()  # text that is not UTF-8 must not stop the read
    with ThreadPoolExecutor(8) as pool:
        return list(pool.map(_bytes_or_file, fields["bytes"].to_pylist(), names))


def _bytes_or_file(image: bytes | None, name: bytes | None) -> bytes | BrokenImageError | None:
    if image is not None or name is None:
        return image
    path = name.decode(errors="replace")
    absolute = _ABSOLUTE.fullmatch(path)
    if absolute is None or ".." in path.split("/"):
        return BrokenImageError("no image bytes, and a path that is not absolute")
    root, below = absolute.groups()
    # A read from a device or a pipe would never end.
    if not root and not os.path.isfile(path):
        return BrokenImageError("file not found")
    return read_image(Place(root or "/") / below)
