"""A proxy before an S3 server that injects slow, throttled, cut, denied and refused requests."""

import contextlib
import hashlib
import http.client
import socket
import threading
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Literal, Self, final
from urllib.parse import parse_qs, unquote, urlsplit

from tests.conftest import BUCKET

Kind = Literal["slow", "throttled", "denied", "cut", "short", "lost", "away"]
# Error responses of S3: status, code, message.
_REFUSALS = {
    "throttled": (503, "SlowDown", "Please reduce your request rate."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
# Headers that a proxy and a server both set.
_HOP_HEADERS = {"connection", "content-length", "date", "expect", "keep-alive", "server", "transfer-encoding"}


@final
@dataclass
class Fault:
    """A fault for requests of some methods (by default all) with keys that begin with ``prefix``.

    slow       the response is delayed by ``seconds``
    throttled  503 SlowDown
    denied     403 AccessDenied
    cut        the connection closes after ``after`` bytes of a body announced as longer
    short      the body is truncated and its length announced as such, as by a faulty server
    lost       the request is executed, and the connection closes without a response
    away       the connection closes without a response, and nothing is executed

    The seed selects a ``fraction`` of these requests; the fault ends after ``times`` of them. It begins
    once keys that begin with each prefix in ``since`` have been written, in order.
    """

    kind: Kind
    methods: str = ""
    prefix: str = ""
    fraction: float = 1.0
    times: int | None = None
    after: int = 0
    seconds: float = 0.0
    since: tuple[str, ...] = ()

    def concerns(self, method: str, key: str) -> bool:
        is_on = self.times != 0 and not self.since
        return is_on and method in (self.methods.split() or [method]) and key.startswith(self.prefix)

    def note_written(self, key: str) -> None:
        if self.since and key.startswith(self.since[0]):
            self.since = self.since[1:]


@final
class FaultyS3:
    """Forward requests to the server at ``upstream``, with the active faults.

    The requests affected by a fraction depend on the seed, the request, and the number of its repetitions,
    not on the order in which requests of several processes arrive.
    """

    def __init__(self, upstream: str, *, seed: int = 0) -> None:
        self.upstream, self._seed = upstream, seed
        self._faults: list[Fault] = []
        self._away_until = 0.0
        self._times_seen: Counter[str] = Counter()
        self._outcomes: Counter[tuple[str, str, str]] = Counter()
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), _Handler)
        self._server.faulty = self

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def uri(self, path: str) -> str:
        """Return the URI of a path in the test bucket through this proxy, valid in any process."""
        return (
            f"s3://{BUCKET}/{path}?scheme=http&endpoint_override=127.0.0.1:{self._server.server_address[1]}"
        )

    def add(self, kind: Kind, **how: Any) -> None:
        """Activate a fault; ``how`` sets the fields of ``Fault``."""
        with self._lock:
            self._faults.append(Fault(kind, **how))

    def go_away(self, seconds: float) -> None:
        """Close every connection without a response for this many seconds."""
        with self._lock:
            self._away_until = time.monotonic() + seconds

    def heal(self) -> None:
        """Deactivate all faults and reset the counts."""
        with self._lock:
            self._faults.clear()
            self._outcomes.clear()
            self._away_until = 0.0

    def count(self, outcome: Kind | Literal["ok", ""] = "", *, method: str = "", prefix: str = "") -> int:
        """Return the number of requests, or of those with this outcome: ``ok`` or a fault kind."""
        with self._lock:
            return sum(
                number
                for (its_method, key, its_outcome), number in self._outcomes.items()
                if method in ("", its_method) and outcome in ("", its_outcome) and key.startswith(prefix)
            )

    def faults_of(self, method: str, target: str, headers: Mapping[str, str]) -> dict[Kind, Fault]:
        """Return the faults of a request, and count it."""
        key = _key(target)
        with self._lock:
            name = f"{method} {target} {headers.get('range')}"
            self._times_seen[name] += 1
            matching = self._matching_faults(method, key, f"{name} {self._times_seen[name]}")
            self._outcomes[method, key, next(iter(matching), "ok")] += 1
            return matching

    def note_written(self, target: str) -> None:
        """Start the faults that wait until this key is written."""
        with self._lock:
            for fault in self._faults:
                fault.note_written(_key(target))

    def _matching_faults(self, method: str, key: str, name: str) -> dict[Kind, Fault]:
        if time.monotonic() < self._away_until:
            return {"away": Fault("away")}
        matching: dict[Kind, Fault] = {}
        for index, fault in enumerate(self._faults):
            if fault.concerns(method, key) and _draw(f"{self._seed} {index} {name}") < fault.fraction:
                matching[fault.kind] = fault
                fault.times = None if fault.times is None else fault.times - 1
        return matching


@final
@dataclass(frozen=True)
class _Answer:
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    faulty: FaultyS3


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server  # pyright: ignore[reportIncompatibleVariableOverride]

    def handle_any(self) -> None:
        with contextlib.suppress(ConnectionError):  # the client closed the connection
            self._answer()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815  (what http.server looks for)

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def _answer(self) -> None:
        headers = {name.lower(): value for name, value in self.headers.items()}
        body = self._read_body(headers)
        faults = self.server.faulty.faults_of(self.command, self.path, headers)
        if "slow" in faults:
            time.sleep(faults["slow"].seconds)
        if "away" in faults:
            self._hang_up()
        elif refusal := next((_REFUSALS[kind] for kind in faults if kind in _REFUSALS), None):
            self._send(_refused(*refusal))
        else:
            answer = self._pass_on(headers, body)
            if self.command in ("PUT", "POST"):
                self.server.faulty.note_written(self.path)
            if "lost" in faults:
                self._hang_up()
            elif "short" in faults:
                self._send(_Answer(answer.status, answer.headers, answer.body[: faults["short"].after]))
            else:
                self._send(answer, cut_after=faults["cut"].after if "cut" in faults else None)

    def _read_body(self, headers: Mapping[str, str]) -> bytes:
        if "chunked" not in headers.get("transfer-encoding", ""):
            return self.rfile.read(int(headers.get("content-length", 0)))
        chunks: list[bytes] = []
        while size := int(self.rfile.readline().partition(b";")[0], 16):
            chunks.append(self.rfile.read(size))
            self.rfile.readline()
        while self.rfile.readline().strip():
            pass
        return b"".join(chunks)

    def _pass_on(self, headers: Mapping[str, str], body: bytes) -> _Answer:
        upstream = urlsplit(self.server.faulty.upstream)
        connection = http.client.HTTPConnection(str(upstream.hostname), upstream.port, timeout=60)
        # The Host header is part of the signature and must not change.
        kept = {name: value for name, value in headers.items() if name not in _HOP_HEADERS}
        with contextlib.closing(connection):
            connection.request(self.command, self.path, body=body, headers=kept)
            answer = connection.getresponse()
            return _Answer(answer.status, tuple(answer.getheaders()), answer.read())

    def _send(self, answer: _Answer, *, cut_after: int | None = None) -> None:
        self.send_response_only(answer.status)
        length = str(len(answer.body))
        for name, value in answer.headers:
            if name.lower() not in _HOP_HEADERS:
                self.send_header(name, value)
            elif name.lower() == "content-length" and self.command == "HEAD":
                length = value  # the length of the object, which HEAD does not send
        self.send_header("Content-Length", length)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body[:cut_after])
        if cut_after is not None:
            self._hang_up()

    def _hang_up(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)


def _key(target: str) -> str:
    """Return the key of an object, or the prefix of a listing."""
    parts = urlsplit(target)
    _, _, key = unquote(parts.path).removeprefix("/").partition("/")
    return key or parse_qs(parts.query).get("prefix", [""])[0]


def _refused(status: int, code: str, message: str) -> _Answer:
    text = f"<Error><Code>{code}</Code><Message>{message}</Message><RequestId>0</RequestId></Error>"
    body = f'<?xml version="1.0" encoding="UTF-8"?>\n{text}'.encode()
    return _Answer(status, (("Content-Type", "application/xml"),), body)


def _draw(name: str) -> float:
    """Return a number in [0, 1), the same for the same name."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest()) / 2**64
