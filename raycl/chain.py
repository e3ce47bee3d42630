"""``chain.jsonl``: the history of a run as a chain of hashes, one link per line.

Each link has the hash of the link before it, so that no link can be changed, removed or added in the middle. Links bind
the run's files by their SHA-256: its settings and data at each start, its log and its state at each checkpoint.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from raycl.errors import DataError
from raycl.splitmix import INCREMENT, mix
from raycl.storage import Place, parse_object

CHAIN = "chain.jsonl"
DAMAGED = "chain.damaged.jsonl"
# The kinds of links: a group of workers starts, goes back to an earlier step, saves a checkpoint, or ends the run.
START, ROLLBACK, CHECKPOINT, END = "start", "rollback", "checkpoint", "end"
_FIRST = "0" * 64
_PIECE_BYTES = 64 * 2**20  # most files take one request, so that no other file can replace them in between


@final
class Chain:
    """The chain of an output, kept in memory and written as a whole, since an object store cannot append."""

    def __init__(self, output: Place) -> None:
        """Continue the chain of the output, if it has one; a damaged one is moved away (``is_damaged``)."""
        self._place, self.is_damaged = output / CHAIN, False
        try:
            self._links = read_chain(output)
        except DataError:
            # A run needs no chain to continue.
            self._links, self.is_damaged = [], True
            (output / DAMAGED).write_bytes(self._place.read_bytes())

    def add(self, kind: str, values: Mapping[str, Any]) -> str:
        """Add a link, and return its hash."""
        link = {"kind": kind, **values, "previous": self._links[-1]["hash"] if self._links else _FIRST}
        self._links.append(link | {"hash": _hash_of(link)})
        return self._links[-1]["hash"]

    def flush(self) -> None:
        """Write all links; raises ``StorageError``."""
        self._place.write_text("".join(f"{json.dumps(link)}\n" for link in self._links))


def read_chain(output: Place) -> list[dict[str, Any]]:
    """Return all links of a run, none without a chain; raises ``DataError`` for a link that does not fit."""
    place, previous = output / CHAIN, _FIRST
    links: list[dict[str, Any]] = []
    content = place.read_bytes().decode(errors="replace") if place.exists() else ""
    for number, line in enumerate(content.splitlines(), 1):
        link = parse_object(line) or {}
        if link.get("previous") != previous or link.get("hash") != _hash_of(link):
            raise DataError(f"link {number} of {place} was changed, or links before it are missing")
        links.append(link)
        previous = link["hash"]
    return links


def kept_links(links: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the links whose steps belong to the run in the end, without those that a later start or rollback undid.

    A start or rollback continues the link of the checkpoint that it names, or begins a new chain if it names none.
    """
    saved: dict[str, int] = {}  # the last link of each checkpoint
    before: list[int | None] = []  # of each link, the one that it continues
    for number, link in enumerate(links):
        if link["kind"] in (START, ROLLBACK):
            before.append(saved.get(link.get("checkpoint") or ""))
        else:
            before.append(number - 1 if number else None)
        if link["kind"] == CHECKPOINT:
            saved[link["name"]] = number
    kept: list[dict[str, Any]] = []
    number = len(links) - 1 if links else None
    while number is not None:
        kept.append(links[number])
        number = before[number]
    return kept[::-1]


def sha256_of_files(output: Place, names: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files of an output that exist; raises ``StorageError``."""
    places = {name: output / name for name in names}
    return {name: _sha256_of(place) for name, place in places.items() if place.exists()}


def _sha256_of(place: Place) -> str:
    """Return the SHA-256 of a file, read in pieces: a checkpoint may have gigabytes."""
    digest = hashlib.sha256()
    with place.wrap_errors("read"), place.open() as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def sha256_of_local(path: Path) -> str:
    """Return the SHA-256 of a local file, read in parts."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def code_hash() -> str:
    """Return the SHA-256 of all modules of this package, by name."""
    package, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()


def log_heads(lines: Iterable[str]) -> Iterator[dict[str, Any]]:
    """Yield the hash of a log before its first line and after each line, as :class:`LogHash` does."""
    log = LogHash()
    yield log.head()
    for line in lines:
        log.add(line)
        yield log.head()


@final
class LogHash:
    """The number of lines of a log and the SHA-256 of their text, line by line."""

    def __init__(self) -> None:
        self._digest, self._num_lines = hashlib.sha256(), 0

    def add(self, line: str) -> None:
        """Add a line, without its end."""
        self._digest.update(f"{line}\n".encode())
        self._num_lines += 1

    def head(self) -> dict[str, Any]:
        """Return ``lines`` and ``sha256`` of the log so far."""
        return {"lines": self._num_lines, "sha256": self._digest.hexdigest()}


def hash_of_draw(sample_id: NDArray[np.int64], epoch: int) -> int:
    """Return the sum of the hashes of the samples of a batch in an epoch, modulo 2**64.

    Sums of all batches are equal for any order and any number of workers; a sample that is skipped, or drawn twice,
    changes the sum.
    """
    with np.errstate(over="ignore"):
        bits = sample_id.astype(np.uint64) * np.uint64(INCREMENT) + mix(np.uint64(epoch + 1))
        return int(mix(mix(bits)).sum(dtype=np.uint64))


def _hash_of(link: Mapping[str, Any]) -> str:
    values = {name: value for name, value in link.items() if name != "hash"}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
