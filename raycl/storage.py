"""Places: a local path or an ``s3://`` address, read and written alike.

Custom S3 endpoints and credentials come from the usual AWS variables
(``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ...).
"""

import os
import posixpath
import uuid
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, final

from pyarrow import fs

from raycl.errors import StorageError


@final
@dataclass(frozen=True)
class Place:
    """One address in a filesystem; ``place / "name"`` is an address below it.

    Only ``root`` is read as a URI. What lies below keeps its name, whatever characters it has.
    """

    root: str
    path: str = ""

    def __truediv__(self, name: str) -> "Place":
        return Place(self.root, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.uri

    @property
    def uri(self) -> str:
        """The address as text."""
        return f"{self.root.rstrip('/')}/{self.path}" if self.path else self.root

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the local filesystem."""
        return "://" not in self.root

    @property
    def name(self) -> str:
        """The last part of the address."""
        return posixpath.basename(self.uri.rstrip("/"))

    def resolve(self) -> tuple[fs.FileSystem, str]:
        """Return the filesystem and the path in it; raises ``StorageError`` on an unknown scheme."""
        filesystem, path = _open_filesystem(self.root)
        return filesystem, f"{path.rstrip('/')}/{self.path}" if self.path else path

    def exists(self) -> bool:
        """Whether a file or folder is there."""
        return self._info().type != fs.FileType.NotFound

    def is_folder(self) -> bool:
        """Whether this is a folder (on S3: a prefix that holds something)."""
        return self._info().type == fs.FileType.Directory

    def files(self) -> list[tuple[str, int]]:
        """Return (relative path, bytes) of every file below, sorted; hidden ones left out."""
        filesystem, root = self.resolve()
        try:
            found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
        except OSError as error:
            raise self._error("list", error) from error
        below = [(posixpath.relpath(info.path, root), info.size) for info in found if info.is_file]
        return sorted((path, size) for path, size in below if not _is_hidden(path))

    def read_bytes(self) -> bytes:
        """Return the whole file; raises ``StorageError`` if it cannot be read."""
        filesystem, path = self.resolve()
        try:
            with filesystem.open_input_stream(path) as stream:
                return stream.read()
        except OSError as error:
            raise self._error("read", error) from error

    def read_text(self) -> str:
        """Return the whole file as UTF-8 text; raises ``StorageError`` if it cannot be read."""
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError:
            raise StorageError(f"{self} is not text; give a file in UTF-8") from None

    def write_bytes(self, content: bytes) -> None:
        """Replace the file whole or not at all; raises ``StorageError`` if it cannot be written."""
        try:
            if self.is_local:
                self._replace_local(content)
            else:
                # An S3 object appears only when its upload is complete.
                filesystem, path = self.resolve()
                with filesystem.open_output_stream(path) as stream:
                    stream.write(content)
        except OSError as error:
            raise self._error("write", error) from error

    def write_text(self, text: str) -> None:
        """Replace the file by UTF-8 text, whole or not at all."""
        self.write_bytes(text.encode())

    def remove(self) -> None:
        """Remove the folder and all below it, if it is there."""
        filesystem, path = self.resolve()
        try:
            if self.is_folder():
                filesystem.delete_dir(path)
        except OSError as error:
            raise self._error("remove", error) from error

    def check_writable(self) -> None:
        """Write a small file below and remove it; raises ``StorageError`` if that fails.

        A local folder that was not there before is not there afterwards; the folders above it stay.
        """
        is_new = self.is_local and not self.exists()
        probe = self / f".raycl-{uuid.uuid4().hex}"
        probe.write_bytes(b"raycl")
        filesystem, path = probe.resolve()
        try:
            filesystem.delete_file(path)
            if is_new:
                Path(self.resolve()[1]).rmdir()
        except OSError as error:
            raise self._error("delete in", error) from error

    def _replace_local(self, content: bytes) -> None:
        path = Path(self.resolve()[1])
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
        try:
            partial.write_bytes(content)
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)

    def _info(self) -> Any:
        filesystem, path = self.resolve()
        try:
            return filesystem.get_file_info(path)
        except OSError as error:
            raise self._error("look at", error) from error

    def _error(self, verb: str, error: Exception) -> StorageError:
        return StorageError(
            f"cannot {verb} {self.uri!r}: {_first_line(error)}; "
            "check the address, its permissions and (for s3://) the AWS variables"
        )


def absolute(uri: str) -> str:
    """Make a local path absolute: Ray's processes run in folders of their own."""
    return uri if "://" in uri else str(Path(uri).expanduser().absolute())


@lru_cache(maxsize=64)  # opening a connection for every file would cost more than the files
def _open_filesystem(root: str) -> tuple[fs.FileSystem, str]:
    if "://" not in root:
        return fs.LocalFileSystem(), absolute(root)
    try:
        return fs.FileSystem.from_uri(root)
    except (OSError, ValueError) as error:
        raise StorageError(
            f"cannot use the address {root!r}: {_first_line(error)}; give a local path or s3://bucket/path"
        ) from error


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
