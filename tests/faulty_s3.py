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
# As S3 says it: status, code, message.
_REFUSALS = {
    "throttled": (503, "SlowDown", "Please reduce your request rate."),
    "denied": (403, "AccessDenied", "Access Denied"),
}
# What two servers in a row say for themselves.
_HOP_HEADERS = {"connection", "content-length", "date", "expect", "keep-alive", "server", "transfer-encoding"}


@final
@dataclass
class Fault:
    """What befalls requests of some methods (all, if none is named) for keys that begin with ``prefix``.

    slow       the answer comes ``seconds`` late
    throttled  503 SlowDown
    denied     403 AccessDenied
    cut        the connection ends after ``after`` bytes of a body that was promised longer
    short      the body is as short, and promised so: a server that is itself at fault
    lost       the request is carried out, and the connection ends without an answer
    away       the connection ends without an answer, and nothing is carried out

    Of these requests the seed draws a ``fraction``; the fault is over after ``times`` of them. It begins
    when keys that begin with ``since`` have been written, one after the other.
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
    """Pass requests on to the server at ``upstream``, but for the faults that are switched on.

    Which requests a fraction befalls follows from the seed, the request, and how often it has come
    before: not from the order in which the requests of many processes arrive.
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
        """Return the address of a path in the tests' bucket, through this proxy, from any process."""
        return (
            f"s3://{BUCKET}/{path}?scheme=http&endpoint_override=127.0.0.1:{self._server.server_address[1]}"
        )

    def add(self, kind: Kind, **how: Any) -> None:
        """Switch a fault on; ``how`` gives the fields of ``Fault``."""
        with self._lock:
            self._faults.append(Fault(kind, **how))

    def go_away(self, seconds: float) -> None:
        """End every connection without an answer for so long from now on."""
        with self._lock:
            self._away_until = time.monotonic() + seconds

    def heal(self) -> None:
        """Switch all faults off, and count requests from zero again."""
        with self._lock:
            self._faults.clear()
            self._outcomes.clear()
            self._away_until = 0.0

    def count(self, outcome: Kind | Literal["ok", ""] = "", *, method: str = "", prefix: str = "") -> int:
        """Return how many requests came, or ended so: ``ok``, or a kind of fault."""
        with self._lock:
            return sum(
                number
                for (its_method, key, its_outcome), number in self._outcomes.items()
                if method in ("", its_method) and outcome in ("", its_outcome) and key.startswith(prefix)
            )

    def faults_of(self, method: str, target: str, headers: Mapping[str, str]) -> dict[Kind, Fault]:
        """Return what befalls a request, and count it."""
        key = _key(target)
        with self._lock:
            name = f"{method} {target} {headers.get('range')}"
            self._times_seen[name] += 1
            struck = self._struck(method, key, f"{name} {self._times_seen[name]}")
            self._outcomes[method, key, next(iter(struck), "ok")] += 1
            return struck

    def note_written(self, target: str) -> None:
        """Let those faults begin that wait for this key to be written."""
        with self._lock:
            for fault in self._faults:
                fault.note_written(_key(target))

    def _struck(self, method: str, key: str, name: str) -> dict[Kind, Fault]:
        if time.monotonic() < self._away_until:
            return {"away": Fault("away")}
        struck: dict[Kind, Fault] = {}
        for index, fault in enumerate(self._faults):
            if fault.concerns(method, key) and _draw(f"{self._seed} {index} {name}") < fault.fraction:
                struck[fault.kind] = fault
                fault.times = None if fault.times is None else fault.times - 1
        return struck


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
        with contextlib.suppress(ConnectionError):  # the client has given up
            self._answer()

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_any  # noqa: N815  (what http.server looks for)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""

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
        # The Host header stays as it is: it is signed.
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
                length = value  # of the object, which is not sent
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
    """Return the object's key; of a listing, the prefix that is listed."""
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
