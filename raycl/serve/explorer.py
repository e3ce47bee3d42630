"""The explorer's answers to the calls of its API, whose queries are read up to a limit."""

import io
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from email import message_from_string
from email.message import Message
from typing import Annotated, Any, Generic, Literal, TypeVar, final

import numpy as np
from fastapi import HTTPException, Path, Query, Request
from pydantic import ValidationError
from starlette.concurrency import run_in_threadpool

from raycl.errors import ConfigError, DataError, RayclError, RunError, StorageError
from raycl.negatives.bank import Bank
from raycl.negatives.saved_bank import SavedBank
from raycl.negatives.search import Neighbors, norms, why_missing
from raycl.negatives.stats import BankStats
from raycl.records import METRICS, last_checkpoint
from raycl.report.history import Series, read_history
from raycl.serve import schemas
from raycl.serve.sample_viewer import SampleViewer, UnknownSampleError
from raycl.storage import Place, absolute

AnyBank = Bank | SavedBank
Answer = TypeVar("Answer")
_BOUND = 2**63
_PAUSE_FACTOR, _MAX_PAUSE_S = 20.0, 60.0
_CURVES, _MAX_POINTS = ("loss", "knn_top1", "recall_at_10", "recall_at_1"), 240
_DRAWS_PER_SAMPLE = 4
MAX_BYTES = 10_000_000  # of a query
_MAX_FORM_BYTES = 16_384  # of a form around its file
_FIELD = "image"

SampleId = Annotated[int, Path(alias="id", ge=-_BOUND, le=_BOUND - 1, description="Id of a sample.")]
QueryId = Annotated[int, Query(alias="id", ge=-_BOUND, le=_BOUND - 1, description="Id of a sample.")]
NumNeighbors = Annotated[int, Query(ge=1, le=100, description="Number of neighbors.")]


@final
class Paced(Generic[Answer]):
    """Compute an answer at most once per ``keep_s`` seconds, and less often if that is slow.

    After a slow computation the next one waits 20 times its duration, a minute at most. An error is kept as well.
    """

    def __init__(self, compute: Callable[[], Answer], *, keep_s: float) -> None:
        self._compute, self._keep_s = compute, keep_s
        self._lock = threading.Lock()
        self._at, self._took_s = -np.inf, 0.0
        self._last: Answer | RayclError = RunError("nothing was computed yet; try again")

    def get(self) -> Answer:
        """Return the last answer, or compute it; raises the computation's errors."""
        with self._lock:
            start = time.monotonic()
            pause = max(self._keep_s, min(_PAUSE_FACTOR * self._took_s, _MAX_PAUSE_S))
            if start - self._at > pause:
                try:
                    self._last = self._compute()
                    self._took_s = time.monotonic() - start
                except RayclError as error:
                    # Threads that wait for the lock get this error instead of waiting again.
                    self._last, self._took_s = error, 0.0
                self._at = time.monotonic()
            if isinstance(self._last, RayclError):
                raise type(self._last)(str(self._last))
            return self._last


@final
class ReconnectingBank:
    """Query a bank from any thread, and reconnect after it was lost.

    All viewers share the statistics, which are :class:`Paced`. Every method raises ``RunError`` while the bank is unreachable.
    """

    def __init__(self, connect: Callable[[], AnyBank], *, keep_s: float = 1.0) -> None:
        """``connect`` is called by the first query, and after each loss."""
        self._connect = connect
        self._bank: AnyBank | None = None
        self._connecting = threading.Lock()
        self._failed_at, self._failure = -np.inf, ""
        self._stats = Paced(lambda: self.ask(lambda bank: bank.stats()), keep_s=keep_s)

    def ask(self, question: Callable[[AnyBank], Answer]) -> Answer:
        """Return the answer of the bank; raises ``ConfigError`` for a wrong question."""
        bank = self._connected()
        try:
            return question(bank)
        except ConfigError:  # a wrong question, not a lost bank
            raise
        except RayclError as error:
            self._bank = None
            raise RunError(str(error)) from error

    def stats(self) -> BankStats:
        """Return statistics of the bank, cached for a while."""
        return self._stats.get()

    def _connected(self) -> AnyBank:
        asked_at = time.monotonic()
        with self._connecting:
            if self._bank is None:
                if self._failed_at > asked_at:  # another query has just waited for the bank in vain
                    raise RunError(self._failure)
                try:
                    self._bank = self._connect()
                except RayclError as error:
                    self._failed_at, self._failure = time.monotonic(), str(error)
                    raise RunError(str(error)) from error
            return self._bank


@final
class RunProgress:
    """Read loss and evaluation from the log of a run.

    All viewers share one reading per 10 s; after a slow one the next waits 20 times its duration, a minute at most.
    """

    def __init__(self, run: str) -> None:
        """Store the address of the run."""
        self._log = Place(absolute(run)) / METRICS
        self._curves = Paced(self._read, keep_s=10.0)

    def curves(self) -> list[schemas.Curve]:
        """Return the curves that were logged; raises ``StorageError`` if the log cannot be read."""
        return self._curves.get()

    def _read(self) -> list[schemas.Curve]:
        if not self._log.exists():
            return []
        history = read_history(io.BytesIO(self._log.read_bytes()))
        return [_curve(name, history[name].kept()) for name in _CURVES if len(history[name].finite)]


def _curve(name: str, series: Series) -> schemas.Curve:
    good = np.flatnonzero(~np.isnan(series.value))
    good = good[np.unique(np.linspace(0, len(good) - 1, min(len(good), _MAX_POINTS)).astype(np.int64))]
    return schemas.Curve(
        name=name, steps=series.step[good].astype(np.int64).tolist(), values=series.value[good].tolist()
    )


@final
class QueryEncoder:
    """Encode images and texts with the run's last checkpoint, reloaded when a newer one exists."""

    def __init__(self, run: str) -> None:
        """Store the address of the run; the first query loads its checkpoint."""
        self._run, self._encoder = run, None
        self._lock = threading.Lock()

    def embed(self, kind: Literal["image", "text"], content: Any) -> tuple[np.ndarray, str]:
        """Encode a text, or the content of an image file: float32 [dim], and the name of the checkpoint.

        Raises ``StorageError`` before the first checkpoint, ``DataError`` for invalid content, and
        ``ConfigError`` for content of another kind than the run's.
        """
        with self._lock:
            checkpoint = last_checkpoint(Place(absolute(self._run)))
            # Importing torch costs seconds and memory, which queries by id and of a run without checkpoint need not pay.
            from raycl.inference.encoder import load_checkpoint_encoder

            encoder = self._encoder
            if encoder is None or encoder.checkpoint != checkpoint:
                self._encoder = encoder = load_checkpoint_encoder(self._run)
            return encoder.embed(kind, content), encoder.checkpoint


@final
class RepresentationEncoder:
    """Encode images and texts as ``raycl embed`` does, with the encoder that the run has at the first query."""

    def __init__(self, run: str, queries: tuple[schemas.QueryKind, ...]) -> None:
        """Store the address of the run and its kinds of queries, of which the second belongs to the keys."""
        self._run, self._queries = run, queries
        self._lock = threading.Lock()
        self._encoders: list[Any] = []

    def embed(self, kind: Literal["image", "text"], content: Any) -> tuple[np.ndarray, None]:
        """Encode a text, or the content of an image file: float32 [dim].

        Raises ``StorageError`` if the run has no encoder, ``DataError`` for invalid content, and ``ConfigError`` if the
        network cannot be built by its name.
        """
        # As in QueryEncoder.
        from raycl.inference.encoder import read_encoders

        with self._lock:
            if not self._encoders:
                sides: list[Literal["query", "key"]] = ["query", "key"]
                saved = read_encoders(self._run, sides[: len(self._queries)])
                try:
                    self._encoders = [each.build() for each in saved]
                except StorageError as error:
                    raise ConfigError(f"{error}, which a page cannot; query by id") from error
            return self._encoders[self._queries.index(kind)].encode([content])[0].numpy(), None


@final
@dataclass(kw_only=True)
class Explorer:
    """Answer the calls of the API; FastAPI runs the methods that are not async in threads.

    ``queries`` are the kinds of queries allowed beside ids. Every method raises ``RunError`` while the bank
    is unreachable.
    """

    bank: ReconnectingBank
    encoder: QueryEncoder | RepresentationEncoder | None = None
    run: RunProgress | None = None
    samples: SampleViewer | None = None
    queries: tuple[schemas.QueryKind, ...] = ()
    num_answered: int = 0

    def stats(self) -> schemas.Stats:
        """Return statistics of the bank, cached for all viewers."""
        stats = self.bank.stats()
        changed = {"age_histogram": [{"below": b, "rows": rows} for b, rows in stats.age_histogram]}
        return schemas.Stats(
            **asdict(stats) | changed,
            run=stats.output,
            questions=self.num_answered,
            queries=["id", *self.queries],
            shows_samples=self.samples is not None,
        )

    def progress(self) -> schemas.Progress:
        """Return loss and evaluation of the run, read at most once in 10 s for all viewers."""
        return schemas.Progress(curves=[] if self.run is None else self.run.curves())

    def random(self, k: NumNeighbors = 12) -> schemas.SampleIds:
        """Draw samples of the bank at random; a queue may hold a sample several times."""
        found = self.bank.ask(lambda bank: bank.draw(_DRAWS_PER_SAMPLE * k))
        return schemas.SampleIds(sample_ids=list(dict.fromkeys(map(str, found.tolist())))[:k])

    def nearest(self, sample_id: QueryId, k: NumNeighbors = 10) -> schemas.Neighbors:
        """Find the rows nearest to the newest row of a sample, without its own rows."""
        return self._neighbors(self._ask_of_sample(lambda bank: bank.nearest_of(sample_id, k)))

    async def nearest_to_query(self, request: Request, k: NumNeighbors = 10) -> schemas.Neighbors:
        """Find the rows nearest to an image or a text, encoded as the rows are."""
        kind, content = await read_query(request)
        return await run_in_threadpool(self._nearest_to, kind, content, k)

    def rows(self, sample_id: SampleId) -> schemas.Rows:
        """Return the norms and ages of a sample's rows."""
        found = self._ask_of_sample(lambda bank: bank.get(np.array([sample_id])))
        if not len(found):
            raise UnknownSampleError(why_missing([sample_id], self.bank.ask(lambda bank: bank.spec)))
        self.num_answered += 1
        newest = found.newest_step
        by_step = sorted(zip(found.step.tolist(), norms(found.rows).tolist(), strict=True), reverse=True)
        rows = [
            schemas.Row(
                step=step if step >= 0 else None,
                age=newest - step if step >= 0 else None,
                norm=norm if np.isfinite(norm) else None,  # a partition function without a value yet is -inf
            )
            for step, norm in by_step
        ]
        return schemas.Rows(sample_id=str(sample_id), newest_step=_or_none(newest), rows=rows)

    def sample(self, sample_id: SampleId) -> schemas.Sample:
        """Return a sample as a person sees it: a thumbnail, texts, its label."""
        if self.samples is None:
            raise UnknownSampleError(
                "samples cannot be shown without a data set; start the explorer with --data"
            )
        return self.samples.show(sample_id)

    def _nearest_to(self, kind: Literal["image", "text"], content: Any, k: int) -> schemas.Neighbors:
        if kind == "text" and not content.strip():
            raise DataError("the text is empty; type one")
        if self.encoder is None or kind not in self.queries:
            allowed = " or ".join(("id", *self.queries))
            raise ConfigError(f"this run does not encode queries by {kind}; query by {allowed}")
        embedding, checkpoint = self.encoder.embed(kind, content)
        return self._neighbors(self.bank.ask(lambda bank: bank.nearest(embedding, k)[0]), checkpoint)

    def _neighbors(self, found: Neighbors, checkpoint: str | None = None) -> schemas.Neighbors:
        self.num_answered += 1
        held = self.bank.ask(lambda bank: bank.get(np.unique(found.sample_id)))
        names = zip(held.sample_id.tolist(), held.step.tolist(), strict=True)
        norm_of = dict(zip(names, norms(held.rows).tolist(), strict=True))
        columns = found.sample_id.tolist(), found.similarity.tolist(), found.step.tolist()
        neighbors = [
            schemas.Neighbor(
                sample_id=str(sample_id),
                similarity=similarity,
                step=step,
                age=found.newest_step - step,
                norm=norm_of.get((sample_id, step)),
            )
            for sample_id, similarity, step in zip(*columns, strict=True)
        ]
        return schemas.Neighbors(
            newest_step=_or_none(found.newest_step), neighbors=neighbors, checkpoint=checkpoint
        )

    def _ask_of_sample(self, question: Callable[[AnyBank], Answer]) -> Answer:
        """Ask a question in which only the sample's id can be wrong."""
        try:
            return self.bank.ask(question)
        except ConfigError as error:
            raise UnknownSampleError(str(error)) from error


async def read_query(request: Request) -> tuple[Literal["image"], bytes] | tuple[Literal["text"], str]:
    """Return the image of a form, or the text of a JSON object.

    Raises ``HTTPException``: 413 for more than 10 MB, 422 for invalid content, 400 for another type.
    """
    header = Message()
    header["Content-Type"] = request.headers.get("content-type", "")
    kind = header.get_content_type()
    if kind == "multipart/form-data":
        image = _field(await _read(request), str(header.get_param("boundary", "")))
        if len(image) > MAX_BYTES:
            raise _too_large()
        return "image", image
    if kind == "application/json":
        try:
            return "text", schemas.TextQuery.model_validate_json(await _read(request)).text
        except ValidationError as error:
            reason = error.errors()[0]["msg"]
            raise HTTPException(422, f'the JSON is not a query: {reason}; send {{"text": "..."}}') from None
    raise HTTPException(
        400, f"{kind} is not a query; send a form with the file `{_FIELD}`, or JSON with `text`"
    )


async def _read(request: Request) -> bytes:
    content = bytearray()
    async for part in request.stream():
        content += part
        if len(content) > MAX_BYTES + _MAX_FORM_BYTES:
            raise _too_large()
    return bytes(content)


def _too_large() -> HTTPException:
    return HTTPException(413, f"the query has more than {MAX_BYTES // 10**6} MB; send a smaller one")


def _field(content: bytes, boundary: str) -> bytes:
    """Return the image field of a form (RFC 7578): FastAPI's form parser does not come with Ray Serve."""
    if boundary:
        for part in (b"\r\n" + content).split(b"\r\n--" + boundary.encode("latin-1", "replace"))[1:]:
            head, found, value = part.partition(b"\r\n\r\n")
            header = message_from_string(head.decode("utf-8", "replace").removeprefix("\r\n"))
            if found and header.get_param("name", header="content-disposition") == _FIELD:
                return value
    raise HTTPException(422, f"the form has no file named `{_FIELD}`; send one under this name")


def _or_none(newest_step: int) -> int | None:
    return newest_step if newest_step >= 0 else None
