"""Places: a local path or an ``s3://`` address, read and written alike.

Custom S3 endpoints and credentials come from the usual AWS variables
(``AWS_ENDPOINT_URL``, ``AWS_ACCESS_KEY_ID``, ...), and so does how often a request is tried
(``AWS_MAX_ATTEMPTS``).
"""

import contextlib
import errno
import io
import os
import posixpath
import re
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, final

import pyarrow as pa
from pyarrow import fs

from raycl.address import check_address
from raycl.errors import ConfigError, DataError, StorageError, first_line

# A request to S3 that the network or the server fails is tried so often: again at once, then after 50 ms,
# then after twice as long each time: 102 s in all, enough for a server to fail over or a prefix to be split.
ATTEMPTS = 13
MAX_ATTEMPTS = 16  # waits 14 minutes
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0  # without a byte: pyarrow's own 3 s are too few for a server under load
Found = TypeVar("Found")
_MARKS = (0xA5, 0x5A)  # bytes that few files end with, and no file with both
_PICKLED = "ray.data.arrow_pickled_object"
_DENIED = re.compile(r"AWS Error ACCESS_DENIED|HTTP status 403")
_PASSING = re.compile(
    r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT)|"
    r"HTTP status 5\d\d"
)


@final
@dataclass(frozen=True)
class Place:
    """One address in a filesystem; ``place / "name"`` is an address below it.

    Only ``root`` is read as a URI. What lies below keeps its name, whatever characters it has.
    Raises ``StorageError`` for a name that would lead out of ``root``: names also come from listings
    and files that others wrote.
    """

    root: str
    path: str = ""

    def __post_init__(self) -> None:
        if ".." in self.path.split("/") or "\0" in self.path:
            raise StorageError(
                f"{self.path!r} would lead out of {self.root}, below which it was named; mend the file or "
                "listing that has this name"
            )

    def __truediv__(self, name: str) -> "Place":
        return Place(self.root, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.uri

    @property
    def uri(self) -> str:
        """The address as text; what an address says of its endpoint after a ``?`` stays last."""
        address, options = self._split()
        return f"{address.rstrip('/')}/{self.path}{options}" if self.path else self.root

    @property
    def is_local(self) -> bool:
        """Whether this is a path of the local filesystem."""
        return "://" not in self.root

    @property
    def name(self) -> str:
        """The last part of the address."""
        return posixpath.basename(self.path or self._split()[0].rstrip("/"))

    def resolve(self) -> tuple[fs.FileSystem, str]:
        """Return the filesystem and the path in it; raises as :func:`~raycl.address.check_address` does."""
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
        with self.explaining("list"):
            found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
        below = [(posixpath.relpath(info.path, root), info.size) for info in found if info.is_file]
        return sorted((path, size) for path, size in below if not _is_hidden(path))

    def beside(self, name: str) -> "Place":
        """Return an address in the folder that holds this one; of no name, that folder."""
        if self.path:
            folder = posixpath.dirname(self.path)
            return Place(self.root, "/".join(filter(None, (folder, name))))
        address, options = self._split()
        folder = posixpath.dirname(absolute(address).rstrip("/"))
        if folder.endswith(":"):
            raise StorageError(f"{self} is a bucket and no file; give s3://bucket/path")
        return Place(folder + options, name)

    def written_at(self) -> dict[str, float]:
        """Return the names directly below, and when each was written by the storage's clock, in s since 1970."""
        filesystem, root = self.resolve()
        with self.explaining("list"):
            found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        return {info.base_name: (info.mtime_ns or 0) / 1e9 for info in found}

    @contextlib.contextmanager
    def open(self) -> Iterator[pa.NativeFile]:
        """Open the file to read parts of it; raises ``OSError``, also for a part that does not come whole."""
        filesystem, path = self.resolve()
        if self.is_local:
            with filesystem.open_input_file(path) as file:
                yield file
        else:
            with _VerifiedReader(filesystem, path) as file:
                yield pa.PythonFile(file, mode="r")

    def read_bytes(self) -> bytes:
        """Return the whole file; raises ``StorageError`` if it cannot be read, or does not come whole."""
        with self.explaining("read"):
            try:
                return self._read_once()
            except _ShortAnswerError:
                return self._read_once()  # a shorter file may have taken its place meanwhile

    def read_text(self) -> str:
        """Return the whole file as UTF-8 text; raises ``StorageError`` if it cannot be read."""
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError:
            raise StorageError(f"{self} is not text; give a file in UTF-8") from None

    def write_bytes(self, content: bytes) -> None:
        """Replace the file whole or not at all; raises ``StorageError`` if it cannot be written."""
        with self.explaining("write"):
            if self.is_local:
                self._replace_local(content)
            else:
                # An S3 object appears only when its upload is complete.
                filesystem, path = self.resolve()
                with filesystem.open_output_stream(path) as stream:
                    stream.write(content)

    def write_text(self, text: str) -> None:
        """Replace the file by UTF-8 text, whole or not at all."""
        self.write_bytes(text.encode())

    def remove(self) -> None:
        """Remove the folder and all below it, if it is there."""
        filesystem, path = self.resolve()
        with self.explaining("remove"):
            if self.is_folder():
                filesystem.delete_dir(path)

    def delete(self) -> None:
        """Delete the file, if it is there."""
        filesystem, path = self.resolve()
        with self.explaining("delete"), contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(path)

    def check_writable(self) -> None:
        """Write a small file below and remove it; raises ``StorageError`` if that fails.

        A local folder that was not there before is not there afterwards; the folders above it stay.
        """
        is_new = self.is_local and not self.exists()
        probe = self / f".raycl-{uuid.uuid4().hex}"
        probe.write_bytes(b"raycl")
        filesystem, path = probe.resolve()
        with self.explaining("delete in"):
            filesystem.delete_file(path)
            if is_new:
                Path(self.resolve()[1]).rmdir()

    @contextlib.contextmanager
    def explaining(self, verb: str) -> Iterator[None]:
        """Let what the filesystem raises within out as a ``StorageError``."""
        try:
            yield
        except OSError as error:
            raise self.failure(verb, error) from error

    def failure(self, verb: str, error: OSError) -> StorageError:
        """Return one line that says what failed, where, and what to do."""
        return StorageError(f"cannot {verb} {self.uri!r}: {first_line(error)}; {_cure(error)}")

    def _read_once(self) -> bytes:
        filesystem, path = self.resolve()
        with filesystem.open_input_file(path) if self.is_local else _VerifiedReader(filesystem, path) as file:
            return file.read()

    def _split(self) -> tuple[str, str]:
        """Return the root and, of an address, apart from it the options that follow a ``?``."""
        if self.is_local:
            return self.root, ""
        address, mark, options = self.root.partition("?")
        return address, mark + options

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
        with self.explaining("look at"):
            return filesystem.get_file_info(path)


@final
class RetryingS3FileSystem(fs.S3FileSystem):
    """S3 that tries a request again, wherever it goes: pyarrow's own forgets how often when it is pickled.

    Of pyarrow's two strategies the standard one has 100 tries for all requests of a process together.
    """

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], "RetryingS3FileSystem"], tuple[dict[str, Any]]]:
        _, (options,) = super().__reduce__()
        return _patient, (options,)


class _ShortAnswerError(OSError):
    """Fewer bytes came than were asked for."""


@final
class _VerifiedReader(io.RawIOBase):
    """A file on S3 that is read in whole parts, or raises ``OSError``.

    Two things are made good. Of an answer that is too short, and says so, pyarrow says that all of it
    came, and takes for the rest what was in memory. And it never repeats a request for fewer bytes than
    the server's refusal has, which it cannot read then.
    """

    def __init__(self, filesystem: fs.FileSystem, path: str) -> None:
        self._filesystem, self._path = filesystem, path
        self._file = filesystem.open_input_file(path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._file.tell()

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        return self._file.seek(offset, whence)

    def read(self, size: int | None = -1, /) -> bytes:
        start = self.tell()
        left = self._file.size() - start
        num_bytes = left if size is None or size < 0 else min(size, left)
        if num_bytes == 0:
            return b""
        content = bytearray(num_bytes)
        for mark in _MARKS:
            content[-1] = mark
            came = self._fill(content, start)
            if came == num_bytes and content[-1] != mark:
                return bytes(content)
        raise _ShortAnswerError(errno.EIO, "fewer bytes came than were asked for")

    def close(self) -> None:
        self._file.close()
        super().close()

    def _fill(self, content: bytearray, start: int) -> int:
        for wait_s in waits_s():
            self.seek(start)
            try:
                return self._file.readinto(content)
            except OSError as error:
                if "flush response stream" not in str(error):
                    raise
            time.sleep(wait_s)
            # Of a request without an answer to read the refusal can be told: a denial is raised here.
            self._filesystem.get_file_info(self._path)
        self.seek(start)
        return self._file.readinto(content)


def absolute(uri: str | os.PathLike[str]) -> str:
    """Make a local path absolute: Ray's processes run in folders of their own."""
    text = os.fspath(uri)
    return text if "://" in text else str(Path(text).expanduser().absolute())


def is_out_of_reach(error: OSError) -> bool:
    """Whether a file could not be had; otherwise, what it holds could not be understood."""
    return error.errno is not None or "AWS Error" in str(error)


def check_plain(schema: pa.Schema, where: str) -> None:
    """Raise ``DataError`` if a file has a column of pickled objects: to read one is to run what it says.

    Ray Data writes such columns of what Arrow has no type for. It refuses to read them itself, but teaches
    Arrow to, wherever a file is opened.
    """
    pickled = [field.name for field in schema if _is_pickled(field.type)]
    if pickled:
        raise DataError(
            f"{where} holds pickled Python objects in {', '.join(map(repr, pickled))}, which raycl never loads; "
            "write the file without that column"
        )


def attempts() -> int:
    """Return how often a request to S3 is tried; raises ``ConfigError`` for an impossible number."""
    asked = os.environ.get("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    if asked not in map(str, range(1, MAX_ATTEMPTS + 1)):
        raise ConfigError(f"AWS_MAX_ATTEMPTS must be a number from 1 to {MAX_ATTEMPTS}, came {asked!r}")
    return int(asked)


def waits_s() -> list[float]:
    """Return how long pyarrow waits before each further try of a request, in seconds."""
    return [0.025 * 2**tried if tried else 0.0 for tried in range(attempts() - 1)]


@lru_cache(maxsize=64)  # opening a connection for every file would cost more than the files
def _open_filesystem(root: str) -> tuple[fs.FileSystem, str]:
    if "://" not in root:
        return fs.LocalFileSystem(), absolute(root)
    check_address(root)
    try:
        # Of a bucket this asks where it lies, and pyarrow gives that up after seconds.
        filesystem, path = patiently(lambda: fs.FileSystem.from_uri(root))
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(
            f"cannot use the address {root!r}: {first_line(error)}; give a local path or s3://bucket/path"
        ) from error
    _, (options,) = filesystem.__reduce__()
    return _patient(options), path


def patiently(call: Callable[[], Found]) -> Found:
    """Return what a call gives, made again where it fails by a fault that may pass."""
    for wait_s in waits_s():
        try:
            return call()
        except OSError as error:
            if not _may_pass(error):
                raise
        time.sleep(wait_s)
    return call()


def _patient(options: Mapping[str, Any]) -> RetryingS3FileSystem:
    ours = {
        "retry_strategy": fs.AwsDefaultS3RetryStrategy(max_attempts=attempts() - 1),
        "connect_timeout": CONNECT_TIMEOUT_S,
        "request_timeout": REQUEST_TIMEOUT_S,
        # A small object is put whole by one request, which may be repeated without harm.
        "allow_delayed_open": True,
    }
    return RetryingS3FileSystem(**{**options, **ours})


def _is_pickled(kind: pa.DataType) -> bool:
    """Whether values of this type are pickled objects, or hold some."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == _PICKLED or _is_pickled(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _is_pickled(kind.value_type)
    return any(_is_pickled(kind.field(place).type) for place in range(kind.num_fields))


def _is_hidden(path: str) -> bool:
    return any(part.startswith((".", "_")) for part in path.split("/"))


def _may_pass(error: OSError) -> bool:
    """Whether this is a fault of the network or the server, which another try may find mended."""
    return _PASSING.search(str(error)) is not None


def _cure(error: OSError) -> str:
    if _DENIED.search(str(error)):
        return "allow it to the role or key that raycl uses"
    if _may_pass(error):
        tried = "once" if attempts() == 1 else f"{attempts()} times"
        return f"tried {tried}; go on when the storage is well, or raise AWS_MAX_ATTEMPTS"
    if error.errno == errno.EIO:
        return "check the server or disk that it lies on"
    return "check the address, its permissions and (for s3://) the AWS variables"
