"""Places: local paths and ``s3://`` addresses behind one interface.

The usual AWS variables set custom S3 endpoints and credentials (``AWS_ENDPOINT_URL``,
``AWS_ACCESS_KEY_ID``, ...) and the number of attempts per request (``AWS_MAX_ATTEMPTS``).
"""

import contextlib
import errno
import io
import json
import os
import posixpath
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar, final
from urllib.parse import quote

import pyarrow as pa
from pyarrow import fs

from raycl.errors import ConfigError, DataError, StorageError, first_line

# Attempts per S3 request. Retries start at once, then after 50 ms, then double the wait: 102 s in all,
# enough for a server to fail over or a prefix to be split.
ATTEMPTS = 13
MAX_ATTEMPTS = 16  # 14 minutes of retries
CONNECT_TIMEOUT_S = 10.0
REQUEST_TIMEOUT_S = 30.0  # without a byte; pyarrow's default of 3 s is too short for a server under load
Result = TypeVar("Result")
_SECRET = re.compile(r"://[^/@]*:.*@")  # a secret may have any characters, also "/" and "@"
_ONE_SLASH = re.compile(r"[A-Za-z][\w+.-]+:/(?!/)")  # as pathlib writes addresses
_BUCKET = re.compile(r"s3://([^/?@]*@)?[^/?@]")
_PICKLED = "ray.data.arrow_pickled_object"
_DENIED = re.compile(r"AWS Error ACCESS_DENIED|HTTP status 403")
_UNREADABLE_REFUSAL = re.compile("flush response stream")
_TRANSIENT = re.compile(
    r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|SERVICE_UNAVAILABLE|INTERNAL_FAILURE|REQUEST_TIMEOUT)|"
    r"HTTP status 5\d\d"
)


@final
@dataclass(frozen=True)
class Place:
    """An address in a filesystem; ``place / "name"`` is an address below it.

    Only ``root`` is parsed as a URI; names below it may have any characters. Raises ``StorageError`` for
    a name that leads out of ``root``: names also come from listings and files of unknown origin.
    """

    root: str
    path: str = ""

    def __post_init__(self) -> None:
        if ".." in self.path.split("/") or "\0" in self.path:
            raise StorageError(
                f"{self.path!r} would lead out of {self.root}; fix the file or listing with this name"
            )

    def __truediv__(self, name: str) -> "Place":
        return Place(self.root, f"{self.path}/{name}" if self.path else name)

    def __str__(self) -> str:
        return self.uri

    @property
    def uri(self) -> str:
        """The address as text, with its options (``?endpoint_override=...``) at the end."""
        address, options = self._split()
        return f"{address.rstrip('/')}/{self.path}{options}" if self.path else self.root

    @property
    def is_local(self) -> bool:
        """Whether this is a local path."""
        return "://" not in self.root

    @property
    def name(self) -> str:
        """The last part of the address."""
        return posixpath.basename(self.path or self._split()[0].rstrip("/"))

    def resolve(self) -> tuple[fs.FileSystem, str]:
        """Return the filesystem and the path in it; raises as :func:`check_address` does."""
        if self.is_local:  # not cached: a relative path is another place in another working folder
            filesystem, path = fs.LocalFileSystem(), absolute(self.root)
        else:
            filesystem, path = _open_remote(self.root)
        return filesystem, f"{path.rstrip('/')}/{self.path}" if self.path else path

    def for_object_store(self) -> tuple[str, dict[str, str]]:
        """Return the address without options, and these for libraries that read S3 by the crate ``object_store``."""
        if self.is_local:
            return self.resolve()[1], {}
        filesystem = self.resolve()[0]
        _, (given,) = filesystem.__reduce__()
        endpoint = given["endpoint_override"] or os.environ.get("AWS_ENDPOINT_URL", "")
        if endpoint and "://" not in endpoint:
            endpoint = f"{given['scheme']}://{endpoint}"
        # Each library has its own names. The waits between retries hardly grow, so only the time is limited.
        wait_s = f"{sum(backoff_s()):.0f}"
        options = {
            "aws_region": given["region"],
            "max_retries": "1000",
            "retry_timeout": f"{wait_s}s",
            "client_max_retries": "1000",
            "client_retry_timeout": wait_s,
        }
        if endpoint:
            options |= {
                "aws_endpoint": endpoint,
                "aws_allow_http": str(endpoint.startswith("http://")).lower(),
            }
        address = self._split()[0].replace("#", "%23")  # a URL would end there; other letters are escaped
        return Place(address, self.path).uri, options

    def exists(self) -> bool:
        """Whether a file or folder exists."""
        return self._info().type != fs.FileType.NotFound

    def is_folder(self) -> bool:
        """Whether this is a folder (on S3: a prefix of some object)."""
        return self._info().type == fs.FileType.Directory

    def files(self, *, underscored: Iterable[str] = ()) -> list[tuple[str, int]]:
        """Return (relative path, size in bytes) of all files below except hidden ones, sorted.

        Hidden files are those with a name or folder that begins with ``.`` or ``_``; for the endings ``underscored``,
        only with ``.``. Links are followed; one without its file is listed with size 0, and one to a folder above it is not
        followed.
        """
        filesystem, root = self.resolve()
        with self.wrap_errors("list"):
            if self.is_local:
                below = list(_files_below(root, "", (Path(root).resolve(),)))
            else:
                found = filesystem.get_file_info(fs.FileSelector(root, recursive=True))
                start = len(root.rstrip("/")) + 1  # posixpath.relpath is slow for millions of files
                below = [(info.path[start:], info.size) for info in found if info.is_file]
        endings = tuple(underscored)
        return sorted((path, size) for path, size in below if not _is_hidden(path, endings))

    @property
    def parent(self) -> "Place":
        """The folder of this address."""
        if self.path:
            return Place(self.root, posixpath.dirname(self.path))
        address, options = self._split()
        folder = posixpath.dirname(absolute(address).rstrip("/"))
        if folder.endswith(":"):
            raise StorageError(f"{self} is a bucket, not a file; give s3://bucket/path")
        return Place(folder + options)

    def entries(self) -> dict[str, fs.FileInfo]:
        """Return the files and folders directly below, by name."""
        filesystem, root = self.resolve()
        with self.wrap_errors("list"):
            found = filesystem.get_file_info(fs.FileSelector(root, allow_not_found=True))
        try:
            return {info.base_name: info for info in found}
        except UnicodeDecodeError as error:
            raise _not_utf8(root, error.object) from None

    def written_at(self) -> dict[str, float]:
        """Return the names directly below with their modification times: the storage's clock, seconds since 1970."""
        return {name: (info.mtime_ns or 0) / 1e9 for name, info in self.entries().items()}

    @contextlib.contextmanager
    def open(self) -> Iterator[pa.NativeFile]:
        """Open the file for random reads; raises ``OSError``, also for a truncated response."""
        filesystem, path = self.resolve()
        if self.is_local:
            with filesystem.open_input_file(path) as file:
                yield file
        else:
            with _VerifiedReader(filesystem, path) as file:
                yield pa.PythonFile(file, mode="r")

    def read_bytes(self) -> bytes:
        """Return the whole file; raises ``StorageError``, also for a truncated response."""
        with self.wrap_errors("read"):
            try:
                return self._read_once()
            except _TruncatedReadError:
                return self._read_once()  # a shorter file may have replaced it

    def read_text(self) -> str:
        """Return the whole file as UTF-8 text; raises ``StorageError`` if it cannot be read."""
        try:
            return self.read_bytes().decode()
        except UnicodeDecodeError:
            raise StorageError(f"{self} is not text; give a file in UTF-8") from None

    @contextlib.contextmanager
    def create(self) -> Iterator[pa.NativeFile]:
        """Open a stream that replaces the file atomically when the block ends without an error.

        Raises ``StorageError`` if the stream cannot be written, or if a local folder has this name.
        """
        filesystem, path = self.resolve()
        if self.is_local and os.path.isdir(path):
            raise StorageError(f"{self} is a folder; give the name of a file, such as one in this folder")
        folder, name = posixpath.split(path)
        # An S3 object becomes visible when its upload completes.
        partial = posixpath.join(folder, f".{name}.{uuid.uuid4().hex}") if self.is_local else path
        is_whole = False
        with self.wrap_errors("write"):
            try:
                if self.is_local:
                    filesystem.create_dir(folder, recursive=True)
                with filesystem.open_output_stream(partial, compression=None) as stream:
                    yield stream
                    is_whole = True
                if self.is_local:
                    filesystem.move(partial, path)
            except BaseException as error:
                # pyarrow cannot abort an upload: closing the stream replaces the object, also by a part of its content.
                # A failed upload leaves no object: one of this name is the file from before.
                if self.is_local or not (is_whole or isinstance(error, OSError)):
                    with contextlib.suppress(OSError):
                        filesystem.delete_file(partial)
                raise

    def write_bytes(self, content: bytes) -> None:
        """Replace the file atomically; raises ``StorageError`` if that fails."""
        with self.create() as stream:
            stream.write(content)

    def write_text(self, text: str) -> None:
        """Replace the file by UTF-8 text, atomically."""
        self.write_bytes(text.encode())

    def remove(self) -> None:
        """Remove the folder and its content, if it exists; of a link to a folder, the content only."""
        filesystem, path = self.resolve()
        with self.wrap_errors("remove"):
            if self.is_local and os.path.islink(path):
                filesystem.delete_dir_contents(os.path.realpath(path))
            elif self.is_folder():
                filesystem.delete_dir(path)

    def delete(self) -> None:
        """Delete the file, if it exists."""
        filesystem, path = self.resolve()
        with self.wrap_errors("delete"), contextlib.suppress(FileNotFoundError):
            filesystem.delete_file(path)

    def check_writable(self) -> None:
        """Write and remove a small file below; raises ``StorageError`` if that fails.

        A local folder that this creates is removed, but its parents stay.
        """
        is_new = self.is_local and not self.exists()
        probe = self / f".raycl-{uuid.uuid4().hex}"
        probe.write_bytes(b"raycl")
        filesystem, path = probe.resolve()
        with self.wrap_errors("delete in"):
            filesystem.delete_file(path)
            if is_new:
                Path(self.resolve()[1]).rmdir()

    @contextlib.contextmanager
    def wrap_errors(self, verb: str) -> Iterator[None]:
        """Turn the filesystem's errors within into ``StorageError``."""
        try:
            yield
        except OSError as error:
            raise self.failure(verb, error) from error

    def failure(self, verb: str, error: OSError) -> StorageError:
        """Return an error of one line with cause, address and remedy."""
        return StorageError(f"cannot {verb} {self.uri!r}: {first_line(error)}; {_remedy(error)}")

    def _read_once(self) -> bytes:
        filesystem, path = self.resolve()
        with filesystem.open_input_file(path) if self.is_local else _VerifiedReader(filesystem, path) as file:
            return file.read()

    def _split(self) -> tuple[str, str]:
        """Split the options after a ``?`` from an address; a local path has none."""
        if self.is_local:
            return self.root, ""
        address, mark, options = self.root.partition("?")
        return address, mark + options

    def _info(self) -> Any:
        filesystem, path = self.resolve()
        with self.wrap_errors("access"):
            return filesystem.get_file_info(path)


@final
class RetryingS3FileSystem(fs.S3FileSystem):
    """An S3 filesystem whose pickled copies keep its retry strategy; pyarrow's own copies lose it.

    pyarrow's "standard" strategy shares 100 retries among all requests of a process, so this one uses the
    other strategy.
    """

    def __reduce__(self) -> tuple[Callable[[dict[str, Any]], "RetryingS3FileSystem"], tuple[dict[str, Any]]]:
        _, (options,) = super().__reduce__()
        return _retrying, (options,)


class _TruncatedReadError(OSError):
    """A response held fewer bytes than requested."""


@final
class _VerifiedReader(io.RawIOBase):
    """A file on S3 whose reads return all bytes or raise ``OSError``.

    pyarrow reports success for truncated S3 responses and leaves the rest of the buffer uninitialized.
    It also gives up at once if an error response is longer than the requested range.
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
        buffer = bytearray(num_bytes)
        # A truncated response leaves the last byte as it was. A file may end with one of the two marks.
        for mark in (0xA5, 0x5A):
            buffer[-1] = mark
            num_read = with_retries(lambda: self._read_into(buffer, start), on=_UNREADABLE_REFUSAL)
            if num_read == num_bytes and buffer[-1] != mark:
                return bytes(buffer)
        raise _TruncatedReadError(errno.EIO, "the response holds fewer bytes than requested")

    def close(self) -> None:
        self._file.close()
        super().close()

    def _read_into(self, buffer: bytearray, start: int) -> int:
        self.seek(start)
        try:
            return self._file.readinto(buffer)
        except OSError as error:
            if _UNREADABLE_REFUSAL.search(str(error)):
                # This request has a readable answer: it raises if access is denied.
                self._filesystem.get_file_info(self._path)
            raise


def check_address(uri: str) -> None:
    """Raise ``StorageError`` unless it is a local path or has a bucket of S3, ``ConfigError`` if it has credentials."""
    if "://" not in uri:
        return
    _check_no_secret(uri)
    if not _BUCKET.match(uri):
        scheme = uri.partition("://")[0]
        wrong = "it has no bucket" if scheme == "s3" else f"raycl does not support {scheme}://"
        raise StorageError(f"cannot use the address {uri!r}: {wrong}; give a local path or s3://bucket/path")


def _check_no_secret(uri: str) -> None:
    if _SECRET.search(uri):
        raise ConfigError(
            f"the address {_SECRET.sub('://***@', uri)!r} contains credentials, which would be written to files and "
            "logs; remove them, and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        )


def has_options(value: Any) -> bool:
    """Whether a value is an address that may choose an endpoint or a key, which the run of another user must not do."""
    return isinstance(value, str) and "://" in value and bool({"?", "@"} & set(value))


def absolute(uri: str | os.PathLike[str]) -> str:
    """Make a local path absolute: Ray's processes run in other folders.

    Raises ``StorageError`` for an empty address, such as an unset variable of a shell, or one with a single slash after
    its scheme, and ``ConfigError`` for one with credentials.
    """
    text = os.fspath(uri)
    if not text:
        raise StorageError("an address is empty; give a file or a folder, such as . for the working folder")
    _check_no_secret(text)
    if _ONE_SLASH.match(text):
        scheme, rest = text.split(":/", 1)
        _check_no_secret(f"{scheme}://{rest}")
        raise StorageError(
            f"cannot use the address {text!r}: it has one slash after {scheme}:, as in a pathlib.Path; give a local path, or "
            "an address as text, like 's3://bucket/path'"
        )
    # Unlike Path.expanduser, this leaves the name of an unknown user as it is.
    return text if "://" in text else str(Path(os.path.expanduser(text)).absolute())


def is_in_copy_of_job(path: str) -> bool:
    """Whether an absolute path lies in Ray's copy of a submitted folder, which Ray deletes after the job."""
    return "working_dir_files" in path.split("/")


def repeated(uris: Iterable[str]) -> str | None:
    """Return an address that is given twice, also as another path or with a slash at its end; None without one."""
    places = [absolute(each).rstrip("/") for each in uris]
    return next((each for each in places if places.count(each) > 1), None)


def parse_object(text: str | bytes) -> dict[str, Any] | None:
    """Return the object in a text of JSON, None if the text is damaged or has another value."""
    try:
        found = json.loads(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def is_unreachable(error: OSError) -> bool:
    """Whether the error is about access rather than content."""
    return error.errno is not None or "AWS Error" in str(error)


def check_plain(schema: pa.Schema, where: str) -> None:
    """Raise ``DataError`` if a file has a column of pickled objects: reading one would run its code.

    Ray Data writes such columns for values without an Arrow type. It refuses to read them itself, but
    registers their type with Arrow, which then unpickles them in any reader.
    """
    pickled = [field.name for field in schema if _is_pickled(field.type)]
    if pickled:
        raise DataError(
            f"{where} holds pickled Python objects in {', '.join(map(repr, pickled))}, which raycl never loads; "
            "write the file without that column"
        )


def attempts() -> int:
    """Return the number of attempts per S3 request; raises ``ConfigError`` if the setting is invalid."""
    asked = os.environ.get("AWS_MAX_ATTEMPTS", str(ATTEMPTS))
    if asked not in map(str, range(1, MAX_ATTEMPTS + 1)):
        raise ConfigError(f"AWS_MAX_ATTEMPTS must be a number from 1 to {MAX_ATTEMPTS}, came {asked!r}")
    return int(asked)


def backoff_s() -> list[float]:
    """Return the wait before each retry in seconds, as pyarrow has it."""
    return [0.025 * 2**tried if tried else 0.0 for tried in range(attempts() - 1)]


def is_outage(error: StorageError) -> bool:
    """Whether the storage does not work at the time, in contrast to one file or folder that cannot be read."""
    return bool(_TRANSIENT.search(str(error.__cause__)))


def with_retries(call: Callable[[], Result], *, on: re.Pattern[str] = _TRANSIENT) -> Result:
    """Return the result of ``call``, retried on errors of this kind, by default transient faults."""
    for wait_s in backoff_s():
        try:
            return call()
        except OSError as error:
            if not on.search(str(error)):
                raise
        time.sleep(wait_s)
    return call()


@lru_cache(maxsize=64)  # a new connection for each file would cost more than the file
def _open_remote(root: str) -> tuple[fs.FileSystem, str]:
    check_address(root)
    address, mark, options = root.partition("?")
    # Arrow's URIs hold only ASCII and no spaces, and end at a "#". An escape such as %20 stays one.
    uri = quote(address, safe="/:@%!$&'()*+,;=") + mark + options
    try:
        # This asks for the bucket's region, which pyarrow retries for seconds only.
        filesystem, path = with_retries(lambda: fs.FileSystem.from_uri(uri))
    except (OSError, pa.ArrowInvalid) as error:
        raise StorageError(
            f"cannot use the address {root!r}: {first_line(error)}; give a local path or s3://bucket/path"
        ) from error
    _, (options,) = filesystem.__reduce__()
    return _retrying(options), path


def _retrying(options: Mapping[str, Any]) -> RetryingS3FileSystem:
    ours = {
        "retry_strategy": fs.AwsDefaultS3RetryStrategy(max_attempts=attempts() - 1),
        "connect_timeout": CONNECT_TIMEOUT_S,
        "request_timeout": REQUEST_TIMEOUT_S,
        # A small object takes a single request, which is safe to repeat.
        "allow_delayed_open": True,
    }
    return RetryingS3FileSystem(**{**options, **ours})


def _is_pickled(kind: pa.DataType) -> bool:
    """Whether a type holds pickled objects, itself or in a nested field."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.extension_name == _PICKLED or _is_pickled(kind.storage_type)
    if pa.types.is_dictionary(kind):
        return _is_pickled(kind.value_type)
    return any(_is_pickled(kind.field(place).type) for place in range(kind.num_fields))


def _files_below(root: str, folder: str, real: tuple[Path, ...]) -> Iterator[tuple[str, int]]:
    """Yield (path below ``root``, size) of the files in a local folder and below, except those that begin with ``.``.

    ``real`` are the folders on the way to this one and itself, as they are named without links.
    """
    with os.scandir(f"{root}/{folder}") as entries:
        for entry in entries:
            if entry.name.startswith("."):
                continue
            _check_utf8(f"{root}/{folder}", entry.name)
            try:
                found = entry.stat()
            except OSError as error:
                if entry.is_symlink():
                    yield f"{folder}{entry.name}", 0
                elif not isinstance(error, FileNotFoundError):  # a file that was deleted just now
                    raise
                continue
            if stat.S_ISREG(found.st_mode):
                yield f"{folder}{entry.name}", found.st_size
            if stat.S_ISDIR(found.st_mode):
                target = real[-1] / entry.name
                if entry.is_symlink():
                    target = Path(entry.path).resolve()
                    if any(each.is_relative_to(target) for each in real):
                        continue
                yield from _files_below(root, f"{folder}{entry.name}/", (*real, target))


def _check_utf8(folder: str, name: str) -> None:
    try:
        name.encode()
    except UnicodeEncodeError:
        raise _not_utf8(folder, os.fsencode(name)) from None


def _not_utf8(folder: str, name: bytes) -> StorageError:
    name = posixpath.basename(name)
    return StorageError(f"{folder.rstrip('/')} holds a file whose name is not UTF-8 ({name!r}); rename it")


def _is_hidden(path: str, underscored: tuple[str, ...]) -> bool:
    marks = (".",) if path.lower().endswith(underscored) else (".", "_")
    return any(part.startswith(marks) for part in path.split("/"))


def _remedy(error: OSError) -> str:
    if _DENIED.search(str(error)):
        return "allow it to the role or key that raycl uses"
    if _TRANSIENT.search(str(error)):
        tried = "once" if attempts() == 1 else f"{attempts()} times"
        return f"tried {tried}; repeat the command when the storage works, or raise AWS_MAX_ATTEMPTS"
    if error.errno == errno.EIO:
        return "check the server or disk that holds it"
    return "check the address, its permissions and (for s3://) the AWS variables"
