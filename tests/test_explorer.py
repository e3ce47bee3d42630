"""The explorer's page and API over HTTP without a cluster, with bank actors in this process."""

import asyncio
import itertools
import json
import re
import signal
import socket
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from urllib.parse import parse_qs, urlsplit

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from fastapi.testclient import TestClient
from PIL import Image

import raycl
from raycl.cli import bank as cli_bank
from raycl.cli import serve
from raycl.config.overrides import config_to_yaml
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.sources import Source
from raycl.data.texts import ids_and_rows
from raycl.embedding_snapshot import LATEST, read_snapshot, write_snapshot
from raycl.errors import ConfigError, DataError, RunError, StorageError
from raycl.models.registry import OWN
from raycl.negatives import bank as bank_module
from raycl.negatives import saved_bank
from raycl.negatives.actor import MemoryBankActor, QueueActor, Update
from raycl.negatives.bank import Bank
from raycl.negatives.saved_bank import read_embedded, read_saved_bank
from raycl.negatives.snapshot import write_samples
from raycl.negatives.spec import BankSpec
from raycl.negatives.store import Negatives
from raycl.serve.app import create_app
from raycl.serve.auth import HEADERS, checked_token, new_token
from raycl.serve.explorer import MAX_BYTES, Explorer, QueryEncoder, ReconnectingBank, RunProgress
from raycl.serve.sample_viewer import SampleViewer, UnknownSampleError, thumbnail
from raycl.serve.target import ServeTarget, columns_of, saved_explorer
from raycl.storage import Place
from raycl.tokenization import train_tokenizer
from raycl.training.preflight import column_names, describe_data
from raycl.training.stores import bank_spec
from tests.images import digit_files, encode, write_digits
from tests.outputs import evaluation, line_of, write_run, write_snapshots
from tests.pairs import rows_of, small_config, vocabulary
from tests.ports import free_ports
from tests.settings import override_active
from tests.test_checkpoint_encoder import list_checkpoint, write_checkpoint
from tests.test_cli import run_raycl
from tests.texts import invented_texts
from tests.towers import save, trained

TOKEN = "0123456789abcdef"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
DIM, CAPACITY = 8, 64
LARGE_ID = 2**62 + 1  # too large for a JavaScript number


class DirectConnection:
    """A connection to a live or dead actor in this process."""

    def __init__(self, actor: Any, name: str, *, timeout_s: float) -> None:
        self._actor = actor

    def send(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if getattr(self._actor, "is_dead", False):
            raise RunError("the bank's shard 'test/0' did not answer")
        answer = getattr(self._actor, method.__name__)(*arguments)
        return SimpleNamespace(result=lambda: answer)

    def ask(self, method: Callable[..., Any], *arguments: Any) -> Any:
        return self.send(method, *arguments).result()


def push(bank: Bank, rows: np.ndarray, sample_id: np.ndarray, step: int) -> None:
    (actor,) = bank.actors
    actor.push(0, Negatives(rows, sample_id, np.full(len(rows), step)), actor.store.sequence + len(rows))


@pytest.fixture
def called(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = {"Address": {"NodeID": "here", "IPAddress": "127.0.0.1"}, "NumRestarts": 0}
    monkeypatch.setattr(bank_module, "ShardConnection", DirectConnection)
    monkeypatch.setattr(bank_module, "actor_facts", lambda actor: facts)


def unit_rows(num_rows: int, seed: int) -> np.ndarray:
    rows = np.random.default_rng(seed).standard_normal((num_rows, DIM)).astype(np.float32)
    return rows / np.linalg.norm(rows, axis=1, keepdims=True)


@pytest.fixture
def bank(called: None, tmp_path: Path) -> Bank:
    """Return a queue with 10 rows from each of steps 1 to 3, of samples 0 to 29, and one row with a large id."""
    (tmp_path / "run").mkdir()
    spec = BankSpec(name="test", kind="queue", dim=DIM, capacity=CAPACITY, output=str(tmp_path / "run"))
    bank = Bank(spec, [QueueActor(spec)])
    for step in range(3):
        push(bank, unit_rows(10, step), np.arange(10) + 10 * step, step + 1)
    push(bank, 0.5 * unit_rows(1, 9), np.array([LARGE_ID]), 5)
    return bank


Open = Callable[..., TestClient]


@pytest.fixture
def opened(bank: Bank) -> Open:
    """Open the explorer with its token."""

    def open_(**parts: Any) -> TestClient:
        parts = {"bank": ReconnectingBank(lambda: bank, keep_s=0)} | parts
        return TestClient(create_app(Explorer(**parts), TOKEN), headers=BEARER)

    return open_


def refusal(answer: Any) -> tuple[int, str]:
    """Return the status and the line; fail unless the response is one line of text."""
    detail = answer.json()["detail"]
    assert isinstance(detail, str) and "\n" not in detail
    return answer.status_code, detail


# ---- access


@pytest.mark.parametrize("path", ["stats", "run", "random", "nearest?id=3", "rows/3", "samples/3"])
@pytest.mark.parametrize(
    "header", [None, "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", "Bearer \xe9"]
)
def test_the_api_requires_the_token(opened: Open, path: str, header: str | None) -> None:
    client = opened()
    del client.headers["Authorization"]
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    answer = client.get(f"/api/{path}", headers=headers)
    assert refusal(answer)[0] == 401
    assert answer.headers["www-authenticate"] == "Bearer"


def test_an_upload_without_the_token_is_refused_before_reading_it(opened: Open) -> None:
    client = opened()
    del client.headers["Authorization"]

    def endless():
        yield b"x"
        raise AssertionError("the body was read")

    assert client.post("/api/nearest", content=endless()).status_code == 401
    assert client.post(f"/api/nearest?token={TOKEN}", json={"text": "a"}).status_code == 401


@pytest.mark.parametrize("path", ["/", "/docs", "/openapi.json", "/explorer.js", "/api/stats", "/nowhere"])
def test_every_response_has_security_headers_and_allows_no_other_site(opened: Open, path: str) -> None:
    answer = opened().get(path, headers={"Origin": "http://elsewhere.example"})
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert not [name for name in answer.headers if name.startswith("access-control-")]
    assert "unsafe" not in answer.headers["Content-Security-Policy"]


def test_an_internal_error_is_answered_in_one_line_without_its_text(
    opened: Open, caplog: pytest.LogCaptureFixture
) -> None:
    class Faulty:
        def show(self, sample_id: int) -> None:
            raise KeyError("a secret path")

    answer = opened(samples=Faulty()).get("/api/samples/3")
    assert refusal(answer) == (500, "the explorer failed; its log has the traceback")
    assert {name: answer.headers[name] for name in HEADERS} == HEADERS
    assert "a secret path" in caplog.text


def test_tokens_are_random_and_weak_ones_are_refused() -> None:
    assert new_token() != new_token()
    assert checked_token(new_token())
    for weak in ("", "short", "with space in it 123", "ünïcodeünïcodeünïcode", "a" * 20 + "\n"):
        with pytest.raises(ConfigError, match="a token has 16"):
            checked_token(weak)


# ---- responses


def test_statistics_come_from_the_bank(opened: Open, bank: Bank) -> None:
    found, counted = opened().get("/api/stats").json(), bank.stats()
    for name in ("name", "kind", "rows", "filled", "dim", "newest_step", "age_mean", "age_max", "norm_min"):
        assert found[name] == getattr(counted, name)
    assert [(each["below"], each["rows"]) for each in found["age_histogram"]] == list(counted.age_histogram)
    assert (found["run"], found["queries"], found["shows_samples"]) == (counted.output, ["id"], False)


def test_neighbors_come_from_the_bank_with_age_and_norm(opened: Open, bank: Bank) -> None:
    shown = opened().get("/api/nearest", params={"id": 3, "k": 31}).json()
    assert shown["newest_step"] == bank.stats().newest_step == 5
    found = shown["neighbors"]
    expected = bank.nearest_of(3, 31)
    assert [int(each["sample_id"]) for each in found] == expected.sample_id.tolist()
    assert [each["similarity"] for each in found] == pytest.approx(expected.similarity.tolist())
    assert [each["age"] for each in found] == (5 - expected.step).tolist()
    norms = {each["sample_id"]: each["norm"] for each in found}
    assert norms.pop(str(LARGE_ID)) == pytest.approx(0.5)
    assert list(norms.values()) == pytest.approx([1.0] * 29, abs=1e-5)


def test_an_id_beyond_the_integers_of_javascript_is_exact(opened: Open) -> None:
    found = opened().get("/api/nearest", params={"id": 3, "k": 100}).json()["neighbors"]
    (large,) = [each["sample_id"] for each in found if len(each["sample_id"]) > 10]
    again = opened().get("/api/nearest", params={"id": large, "k": 1})
    assert (again.status_code, large) == (200, str(LARGE_ID))


def test_rows_of_a_sample_are_listed_newest_first(opened: Open, bank: Bank) -> None:
    push(bank, unit_rows(1, 4), np.array([3]), 6)
    found = opened().get("/api/rows/3").json()
    assert found["newest_step"] == 6
    assert [(row["step"], row["age"]) for row in found["rows"]] == [(6, 0), (1, 5)]
    assert found["rows"][0]["norm"] == pytest.approx(1.0, abs=1e-5)


def test_an_unwritten_slot_has_no_age(called: None, tmp_path: Path) -> None:
    spec = BankSpec(name="slots", kind="memory_bank", dim=DIM, capacity=4, output=str(tmp_path / "run"))
    ids = np.array([1, 2, 3, 4])
    write_samples(spec, ids)
    actor = MemoryBankActor(spec)
    written = Update("a client", 1, ids[:2], unit_rows(2, 0), 7)
    actor.push_pull(0, (written,), np.empty(0, np.int64))
    client = TestClient(
        create_app(Explorer(bank=ReconnectingBank(lambda: Bank(spec, [actor]))), TOKEN), headers=BEARER
    )
    assert client.get("/api/rows/1").json()["rows"][0]["age"] == 0
    assert [(row["step"], row["age"]) for row in client.get("/api/rows/3").json()["rows"]] == [(None, None)]
    assert refusal(client.get("/api/nearest?id=3"))[0] == 404
    assert refusal(client.get("/api/rows/9"))[0] == 404


def test_a_partition_function_without_a_value_has_no_norm_and_is_null_in_json(
    called: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = BankSpec(name="partitions", kind="partition", dim=2, capacity=4, output=str(tmp_path / "run"))
    write_samples(spec, np.array([1, 2, 3, 4]))
    actor = MemoryBankActor(spec)
    written = Update("a client", 1, np.array([1]), np.array([[3.0, 4.0]], np.float32), 7)
    actor.push_pull(0, (written,), np.empty(0, np.int64))
    bank = Bank(spec, [actor])
    explorer = Explorer(bank=ReconnectingBank(lambda: bank))
    assert [explorer.rows(sample).rows[0].norm for sample in (1, 3)] == [5.0, None]
    monkeypatch.setattr(cli_bank, "_connect", lambda *_: bank)
    cli_bank.get("partitions", [1, 3], as_json=True)
    rows = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)["rows"]
    assert [row["embedding"] for row in rows] == [[3.0, 4.0], [None, None]]


# ---- refusals


@pytest.mark.parametrize(
    ("path", "status", "says"),
    [
        ("nearest?id=77", 404, "no row of sample 77"),
        ("rows/77", 404, "no row of sample 77"),
        ("samples/3", 404, "--data"),
        ("nearest?id=3&k=0", 422, "k: .*greater than or equal to 1, got '0'"),
        ("nearest?id=3&k=101", 422, "k: .*less than or equal to 100"),
        ("nearest?id=three", 422, "id: .*integer"),
        (f"nearest?id={2**63}", 422, "id: "),
        ("nearest", 422, "id: "),
        ("rows/x", 422, "id: "),
        ("nowhere", 404, "Not Found"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line(opened: Open, path: str, status: int, says: str) -> None:
    code, detail = refusal(opened().get(f"/api/{path}"))
    assert code == status
    assert re.search(says, detail), detail


@pytest.mark.parametrize(
    ("sent", "status", "says"),
    [
        ({"json": {"text": " "}}, 422, "the text is empty"),
        ({"json": {}}, 422, "the JSON is not a query"),
        ({"json": {"text": "x" * 20_001}}, 422, "at most 20000"),
        ({"content": b"{", "headers": {"Content-Type": "application/json"}}, 422, "the JSON is not a query"),
        ({"content": b"text", "headers": {"Content-Type": "text/plain"}}, 400, "text/plain is not a query"),
        ({"files": {"other": b"x"}}, 422, "no file named `image`"),
        ({"content": b"x", "headers": {"Content-Type": "multipart/form-data"}}, 422, "no file named"),
        ({"files": {"image": b"x" * (MAX_BYTES + 1)}}, 413, "more than 10 MB"),
        ({"files": {"image": b"x" * (MAX_BYTES + 100_000)}}, 413, "more than 10 MB"),
        ({"files": {"image": b"x"}}, 400, "does not encode queries by image; query by id"),
    ],
)
def test_an_invalid_query_is_refused_in_one_line(
    opened: Open, sent: dict[str, Any], status: int, says: str
) -> None:
    code, detail = refusal(opened().post("/api/nearest", **sent))
    assert (code, says in detail) == (status, True), detail


def test_an_upload_over_the_limit_is_not_read_to_the_end(opened: Open) -> None:
    client = opened()
    named = {**client.headers, "content-type": "multipart/form-data; boundary=b"}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/nearest",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }
    found: list[dict[str, Any]] = []
    parts = iter(range(11))

    async def receive() -> dict[str, Any]:
        assert next(parts, None) is not None, "more was read than is allowed"
        return {"type": "http.request", "body": b"x" * 2**20, "more_body": True}

    async def send(message: dict[str, Any]) -> None:
        found.append(message)

    # Calls the application directly: the test client collects the full body before sending.
    asyncio.run(client.app(scope, receive, send))  # type: ignore[arg-type]
    assert found[0]["status"] == 413


class Recorded:
    """An encoder that records queries and returns the row of sample 3."""

    def __init__(self) -> None:
        self.came: list[Any] = []

    def embed(self, kind: str, content: Any) -> tuple[np.ndarray, str]:
        self.came.append((kind, content))
        return unit_rows(10, 0)[3], "step-1"


def test_an_upload_arrives_unchanged(opened: Open) -> None:
    content = bytes(range(256)) * 50 + b"\r\n\r\n--" + b"\n\r\r\n" * 20
    encoder = Recorded()
    client = opened(encoder=encoder, queries=("image", "text"))
    for files in (
        {"image": ("näme; x=1.png", content)},
        [("note", b"before"), ("image", ('a"b.png', content))],
    ):
        found = client.post("/api/nearest?k=1", files=files).json()
        assert (found["neighbors"][0]["sample_id"], found["checkpoint"]) == ("3", "step-1")
        assert encoder.came.pop() == ("image", content)
    client.post("/api/nearest", json={"text": "größer <b>"})
    assert encoder.came.pop() == ("text", "größer <b>")


def test_a_lost_bank_is_answered_with_503_until_it_is_found_again(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = itertools.count(0, 100)  # the clock advances a lot at each reading
    monkeypatch.setattr("raycl.serve.explorer.time", SimpleNamespace(monotonic=lambda: float(next(now))))
    there: list[Bank] = [bank]

    def connect() -> Bank:
        if not there:
            raise ConfigError("there is no bank 'test': no bank is here; check the name")
        return there[0]

    client = TestClient(create_app(Explorer(bank=ReconnectingBank(connect, keep_s=0)), TOKEN), headers=BEARER)
    assert client.get("/api/stats").status_code == 200
    there.clear()
    bank.actors[0].is_dead = True
    for path in ("stats", "nearest?id=3", "rows/3", "stats"):
        assert refusal(client.get(f"/api/{path}"))[0] == 503
    # The resumed run has a new bank with the same name.
    there.append(Bank(bank.spec, [QueueActor(bank.spec)]))
    assert client.get("/api/stats").json()["filled"] == 0


def test_a_row_newer_than_the_last_statistics_has_age_0(opened: Open, bank: Bank) -> None:
    client = opened(bank=ReconnectingBank(lambda: bank, keep_s=60))
    assert client.get("/api/stats").json()["newest_step"] == 5
    push(bank, unit_rows(10, 0)[4:5], np.array([40]), 9)
    assert client.get("/api/nearest?id=4&k=1").json()["neighbors"][0]["age"] == 0
    assert client.get("/api/rows/40").json()["rows"][0]["age"] == 0


def test_slow_statistics_are_requested_rarely_and_never_for_a_query(
    opened: Open, bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted: list[int] = []
    row_stats, now = bank.actors[0].row_stats, [0.0]
    monkeypatch.setattr("raycl.serve.explorer.time", SimpleNamespace(monotonic=lambda: now[0]))

    def slow_count(*slots: Any) -> Any:
        counted.append(1)
        now[0] += 3.0
        return row_stats(*slots)

    bank.actors[0].row_stats = slow_count
    client = opened(bank=ReconnectingBank(lambda: bank, keep_s=1))
    for _ in range(29):
        assert client.get("/api/stats").status_code == 200
        now[0] += 2.0
    assert len(counted) == 1
    now[0] += 4.0
    assert client.get("/api/nearest?id=4&k=1").status_code == 200
    assert len(counted) == 1
    assert client.get("/api/stats").status_code == 200
    assert len(counted) == 2


# ---- samples


def test_an_unanswered_request_to_a_bank_is_retried_immediately(
    bank: Bank, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, is_there = [0.0], [True]
    monkeypatch.setattr("raycl.serve.explorer.time", SimpleNamespace(monotonic=lambda: now[0]))

    def connect() -> Bank:
        if not is_there[0]:
            now[0] += 120.0
            raise ConfigError("there is no bank 'test'")
        return bank

    live = ReconnectingBank(connect, keep_s=1)
    assert live.stats().newest_step == 5
    is_there[0], live._bank = False, None
    now[0] += 70.0
    with pytest.raises(RunError):
        live.stats()
    is_there[0] = True
    now[0] += 2.0
    assert live.stats().newest_step == 5


def test_queries_that_wait_together_for_a_lost_bank_wait_once() -> None:
    arrived, num_tries = threading.Barrier(4), list[int]()

    def connect() -> Bank:
        num_tries.append(1)
        time.sleep(0.5)  # a shard reads its snapshot
        raise RunError("the bank does not answer")

    bank, errors = ReconnectingBank(connect), list[str]()

    def ask() -> None:
        arrived.wait()
        with pytest.raises(RunError) as caught:
            bank.ask(lambda each: each.draw(1))
        errors.append(str(caught.value))

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert errors == ["the bank does not answer"] * 4
    assert len(num_tries) == 1
    with pytest.raises(RunError):
        bank.ask(lambda each: each.draw(1))
    assert len(num_tries) == 2  # a later one tries again


def test_concurrent_requests_for_pictures_read_the_ids_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images, _ = digit_files(8)
    pq.write_table(pa.table({"image": images, "sample_id": np.arange(8) * 10}), tmp_path / "set.parquet")
    columns = ColumnNames(sample_id="sample_id")
    samples = SampleViewer(str(tmp_path / "set.parquet"), columns, max_pixels=10**6)
    num_reads: list[int] = []
    read, arrived = Source.sample_ids, threading.Barrier(4)

    def slow(source: Source, pieces: Any) -> Any:
        num_reads.append(1)
        time.sleep(0.2)
        return read(source, pieces)

    def show(sample_id: int) -> Any:
        arrived.wait()
        return samples.show(sample_id)

    monkeypatch.setattr(Source, "sample_ids", slow)
    with ThreadPoolExecutor(4) as threads:
        found = [each.image for each in threads.map(show, [0, 10, 20, 70])]
    assert found == [thumbnail(images[number], max_pixels=10**6) for number in (0, 1, 2, 7)]
    assert len(num_reads) == 1


def test_a_sample_is_shown_from_a_folder_or_a_file(tmp_path: Path, opened: Open) -> None:
    images, labels = digit_files(150)
    write_digits(tmp_path / "digits.parquet", 150)
    for name, label in (("b", 1), ("a", 0)):
        (tmp_path / "folder" / name).mkdir(parents=True)
        (tmp_path / "folder" / name / "one.png").write_bytes(images[label])
    names = [f"digit {number}" for number in range(10)]
    info = {"info": {"features": {"label": {"names": names, "_type": "ClassLabel"}}}}
    table = pq.read_table(tmp_path / "digits.parquet")
    pq.write_table(
        table.replace_schema_metadata({"huggingface": json.dumps(info)}), tmp_path / "named.parquet"
    )
    for uri, sample_id, content, label in (
        ("digits.parquet", 140, images[140], str(labels[140])),
        ("named.parquet", 140, images[140], f"digit {labels[140]}"),
        ("folder", 1, images[1], "b"),
    ):
        samples = SampleViewer(str(tmp_path / uri), ColumnNames(), max_pixels=10**6)
        found = opened(samples=samples).get(f"/api/samples/{sample_id}").json()
        assert found["image"] == thumbnail(content, max_pixels=10**6)
        assert (found["label"], found["texts"]) == (label, [])
        for unknown in (-1, 150, 2**63 - 1):
            answer = refusal(opened(samples=samples).get(f"/api/samples/{unknown}"))
            message = f"{tmp_path / uri} has no sample {unknown}; give the training data of the run as --data"
            assert answer == (404, message)


def test_ids_from_a_column_and_texts_are_found_in_any_order(tmp_path: Path, opened: Open) -> None:
    ids = np.random.default_rng(0).permutation(3_000) * 7 - 500
    texts = [f"<script>number {each}</script>" for each in ids.tolist()]
    pq.write_table(pa.table({"text": texts, "sample_id": ids}), tmp_path / "texts.parquet")
    samples = SampleViewer(
        str(tmp_path / "texts.parquet"), ColumnNames(image=None, text="text"), max_pixels=1
    )
    client = opened(samples=samples)
    for sample_id in (*ids[:3].tolist(), ids[2_999].item(), -500):
        found = client.get(f"/api/samples/{sample_id}").json()
        assert found["texts"] == [{"role": "text", "text": f"<script>number {sample_id}</script>"}]
        assert found["image"] is None
    assert client.get("/api/samples/1").status_code == 404


def test_a_thumbnail_keeps_the_aspect_and_is_small() -> None:
    import base64
    import io

    wide = encode(Image.effect_noise((900, 300), 50).convert("RGB"))
    head, _, content = thumbnail(wide, max_pixels=10**6).partition(",")
    picture = Image.open(io.BytesIO(base64.b64decode(content)))
    assert (head, picture.size) == ("data:image/jpeg;base64", (128, 43))
    assert len(content) < 20_000


def test_an_image_skipped_in_training_has_no_thumbnail(tmp_path: Path, opened: Open) -> None:
    large = encode(Image.new("L", (300, 300)))
    postscript = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\n"
    pq.write_table(
        pa.table({"image": pa.array([large, postscript, b"broken"], pa.binary())}), tmp_path / "a.parquet"
    )
    client = opened(samples=SampleViewer(str(tmp_path / "a.parquet"), ColumnNames(), max_pixels=10_000))
    for sample_id in range(3):
        code, detail = refusal(client.get(f"/api/samples/{sample_id}"))
        assert (code, f"the image of sample {sample_id} is invalid" in detail) == (422, True)


@pytest.mark.parametrize("name", ["simclr", "moco_v2", "simcse", "two_tower", "clip"])
def test_the_page_shows_only_columns_read_by_the_run(name: str) -> None:
    config = override_active(
        raycl.recipe(name), {"data.columns.label": "kind", "data.columns.image": "photo"}
    )
    looked_at, read = columns_of(config), column_names(config)
    assert looked_at.contents.items() <= read.contents.items()
    assert set(read.contents) - set(looked_at.contents) <= {"negatives"}
    assert (looked_at.label, looked_at.sample_id) == ("kind", None)


# ---- the run


def test_random_samples_are_written_rows_of_the_bank_each_once(
    called: None, opened: Open, bank: Bank
) -> None:
    ids = opened().get("/api/random?k=100").json()["sample_ids"]
    assert sorted(ids) == sorted([*map(str, range(30)), str(LARGE_ID)])
    assert len(set(opened().get("/api/random?k=5").json()["sample_ids"])) == 5
    spec = replace(bank.spec, kind="memory_bank", capacity=20, num_shards=2)
    write_samples(spec, np.arange(20))
    slots = Bank(spec, [MemoryBankActor(spec, shard) for shard in range(2)])
    client = opened(bank=ReconnectingBank(lambda: slots, keep_s=0))
    assert client.get("/api/random").json() == {"sample_ids": []}
    slots.actors[1].replace(np.array([12, 17]), unit_rows(2, 0), 3)
    assert sorted(client.get("/api/random").json()["sample_ids"]) == ["12", "17"]


def test_loss_and_evaluation_of_the_run_are_read_once_in_a_while(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("raycl.serve.explorer.time", SimpleNamespace(monotonic=lambda: now[0]))
    client = opened(run=RunProgress(str(tmp_path)))
    assert client.get("/api/run").json() == {"curves": []}
    lines = [line_of(step, loss=1 / step) for step in range(1, 1_001)]
    write_run(tmp_path, [*lines, line_of(1_001, loss=float("nan")), evaluation(500, knn_top1=0.25)])
    assert client.get("/api/run").json() == {"curves": []}
    now[0] += 11.0
    loss, accuracy = client.get("/api/run").json()["curves"]
    assert (loss["name"], len(loss["steps"]), loss["steps"][0], loss["steps"][-1]) == ("loss", 240, 1, 1_000)
    assert loss["values"] == pytest.approx([1 / step for step in loss["steps"]], rel=1e-4)
    assert accuracy == {"name": "knn_top1", "steps": [500], "values": [0.25]}


# ---- what a run has saved


def saved(bank: Bank, folder: Path, *, with_data: bool = True) -> Path:
    """Write a run's configuration, data and log, and the snapshot of its bank, whose actors are here."""
    write_run(folder, method="moco_v2", settings={"data.image_size": 16})
    if with_data:
        write_digits(folder / "digits.parquet", 40)
        described = {"data": str(folder / "digits.parquet"), "num_rows": 40}
        (folder / "data.json").write_text(json.dumps(described))
    return folder


def test_a_saved_queue_answers_as_the_bank_did(bank: Bank, tmp_path: Path, opened: Open) -> None:
    folder = saved(bank, tmp_path / "run")
    bank.save(3)
    found = saved_explorer(str(folder), embeddings=None, data=None)
    assert (found.bank.stats().shards, found.bank.stats().filled, found.queries) == ((), 31, ("image",))
    client, live = TestClient(create_app(found, TOKEN), headers=BEARER), opened()
    for path in ("nearest?id=3&k=7", "rows/3", f"rows/{LARGE_ID}"):
        assert client.get(f"/api/{path}").json() == live.get(f"/api/{path}").json()
    assert client.get("/api/nearest?id=31").status_code == 404
    assert client.get("/api/samples/3").json()["label"] == live_label(folder, 3)
    assert [each["name"] for each in client.get("/api/run").json()["curves"]] == ["loss", "knn_top1"]


def live_label(folder: Path, row: int) -> str:
    return str(pq.read_table(folder / "digits.parquet")["label"][row].as_py())


@pytest.mark.parametrize(
    ("recipe", "role"), [("two_tower", "document"), ("esimcse", "text"), ("clip", "caption")]
)
def test_the_samples_of_a_queue_of_texts_are_found_by_the_text(
    called: None, recipe: str, role: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_config(recipe, {"negatives.store": "queue", "negatives.capacity": 4_096})
    texts, others = invented_texts(8, seed=1), invented_texts(8, seed=2)
    values: dict[str, list[Any]] = {
        "two_tower": {"query": others, "document": texts},
        "esimcse": {"text": [list(both) for both in zip(texts, others, strict=True)]},
        "clip": {"image": digit_files(8)[0], "caption": texts},
    }[recipe]
    row: Any = rows_of(config, values).take(np.array([5])).contents[role]
    names = ids_and_rows(row)[0]
    folder, data = write_run(tmp_path / "run"), tmp_path / "rows.parquet"
    (folder / "config.yaml").write_text(config_to_yaml(config))
    (folder / "tokenizer.json").write_text(vocabulary().tokenizer.to_json())
    with_invalid = {name: [*each[:2], None, *each[2:]] for name, each in values.items()}
    pq.write_table(pa.table(with_invalid | {"sample_id": range(100, 109)}), data, row_group_size=4)
    spec = bank_spec(config, output=str(folder), name="test", num_samples=None)
    bank = Bank(spec, [QueueActor(spec)])
    push(bank, np.eye(len(names), spec.dim, dtype=spec.row_dtype), names, 3)
    bank.save(3)
    saved = saved_explorer(str(folder), embeddings=None, data=str(data))
    target = ServeTarget(
        bank="test",
        run=str(folder),
        queries=(),
        data=str(data),
        columns=columns_of(config),
        max_pixels=10**6,
        token="",
        trusted="",
        text_ids_of=spec.output,
    )
    for found in (saved, replace(target.explorer(), bank=ReconnectingBank(lambda: bank))):
        for name in names.tolist():
            assert next(each.text for each in found.sample(name).texts if each.role == role) == texts[5]
            assert len(found.rows(name).rows) == 1
        for ask in (found.nearest, found.rows):
            with pytest.raises(
                UnknownSampleError,
                match="queue of texts are hashes .*; choose an id that an answer has shown",
            ):
                ask(105)
    monkeypatch.setattr(cli_bank, "_connect", lambda *_: bank)
    for command in (lambda: cli_bank.nearest("test", 105), lambda: cli_bank.get("test", [105])):
        with pytest.raises(
            ConfigError, match="queue of texts are hashes .*; choose an id that an answer has shown"
        ):
            command()


def test_only_a_queue_of_texts_has_ids_of_texts() -> None:
    for name, expected in (("moco_v2", False), ("esimcse", True), ("simcse", False)):
        assert raycl.recipe(name).has_text_ids == expected


def test_saved_slots_have_the_rows_of_all_shards_and_increments(called: None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", method="instance_discrimination")
    spec = BankSpec(
        name="test",
        kind="memory_bank",
        dim=DIM,
        capacity=21,
        num_shards=2,
        output=str(folder),
        dtype="float16",
    )
    write_samples(spec, np.arange(21) * 3)
    slots = Bank(spec, [MemoryBankActor(spec, shard) for shard in range(2)])
    for step in (1, 2):
        ids = np.arange(5) * 3 + 6 * step
        slots.replace(ids // 3, ids, unit_rows(5, step), step)
        slots.save(step)
    found = read_saved_bank(str(folder))
    assert found.stats().kind == "memory_bank"
    for sample_id in (9, 21):
        one, other = found.nearest_of(sample_id, 20), slots.nearest_of(sample_id, 20)
        assert (one.sample_id.tolist(), one.step.tolist()) == (other.sample_id.tolist(), other.step.tolist())
        np.testing.assert_array_equal(one.similarity, other.similarity)
    assert found.stats().filled == slots.stats().filled == 7


def test_embeddings_are_explored_by_their_ids(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    rows = unit_rows(40, 0)
    table = pa.table(
        {"sample_id": np.arange(40) + 7, "label": np.arange(40) % 3, "representation": list(3 * rows)}
    )
    (tmp_path / "embedded").mkdir()
    pq.write_table(table, tmp_path / "embedded" / "a.parquet")
    found = saved_explorer(str(folder), embeddings=str(tmp_path / "embedded"), data=None)
    assert (found.bank.stats().kind, found.samples) == ("embeddings", None)
    nearest = found.nearest(7, 39).neighbors
    order = np.argsort(-(rows[1:] @ rows[0]))
    assert [int(each.sample_id) - 8 for each in nearest] == order.tolist()


def test_embeddings_are_read_and_measured_without_copies_of_all_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_bank, "ROWS_PER_GROUP", 1_024)
    rows = np.random.default_rng(0).standard_normal((60_000, 64), np.float32)
    flat = pa.FixedSizeListArray.from_arrays(pa.array(rows.ravel()), 64)
    table = pa.table({"sample_id": np.arange(len(rows)), "representation": flat})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=1_024)
    tracemalloc.start()
    found = read_embedded(str(tmp_path), str(tmp_path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found.stats().norm_max == pytest.approx(1)
    assert peak < 2.5 * rows.nbytes  # with an empty array, whose memory is used when the parts are freed


def test_queries_of_saved_rows_do_not_measure_the_rows_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_bank, "ROWS_PER_GROUP", 64)
    rng, ids = np.random.default_rng(0), np.arange(200) * 3
    rows = (rng.standard_normal((200, 8)) * rng.uniform(0.01, 50, (200, 1))).astype(np.float16)
    rows[7] = 0
    step = np.where(np.arange(200) % 5, 4, -1)  # a fifth was never written
    spec = BankSpec(name="test", kind="memory_bank", dim=8, capacity=200, output=str(tmp_path))
    saved = saved_bank.SavedBank(spec, Negatives(rows, ids, step), "memory_bank")
    monkeypatch.setattr("raycl.negatives.search.row_lengths", None)
    query = rng.standard_normal(8)
    found = saved.nearest(query, 200)[0]
    exact = rows.astype(np.float64)
    cosines = exact @ query / np.maximum(np.linalg.norm(exact, axis=1) * np.linalg.norm(query), 1e-12)
    order = np.argsort(-cosines[step >= 0], kind="stable")
    assert found.sample_id.tolist() == ids[step >= 0][order].tolist()
    np.testing.assert_allclose(found.similarity, cosines[step >= 0][order], atol=1e-6)


def test_rows_that_are_not_finite_are_neighbors_of_no_sample(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    write_snapshots(folder)
    place = Place(str(folder))
    snapshot = read_snapshot(place, LATEST)
    assert snapshot is not None
    rows = snapshot.embedding.copy()
    rows[:3] = np.nan
    write_snapshot(place, LATEST, replace(snapshot, embedding=rows))
    found = saved_explorer(str(folder), embeddings=None, data=None)
    best = found.nearest(9, 60).neighbors
    assert len(best) == 60 - 4
    for k in (1, 2, 3, 4):
        assert found.nearest(9, k).neighbors == best[:k]


def posted(client: TestClient, kind: str, content: Any) -> list[str]:
    sent: dict[str, Any] = {"files": {"image": content}} if kind == "image" else {"json": {"text": content}}
    found = client.post("/api/nearest?k=5", **sent).json()
    assert found["neighbors"][0]["similarity"] == pytest.approx(1, abs=1e-5)
    return [each["sample_id"] for each in found["neighbors"]]


@pytest.mark.parametrize(
    ("recipe", "kind", "side"),
    [
        ("clip", "image", "query"),
        ("clip", "text", "key"),
        ("two_tower", "text", "query"),
        ("simcse", "text", "query"),
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_embeddings_are_queried_by_images_and_texts_as_embed_encodes_them(
    recipe: str, kind: str, side: Any, is_finished: bool, tmp_path: Path
) -> None:
    folder, config = tmp_path / "run", small_config(recipe)
    folder.mkdir()
    (folder / "config.yaml").write_text(config_to_yaml(config))
    if is_finished:
        save(config, folder)
    else:
        (folder / "tokenizer.json").write_text(vocabulary().tokenizer.to_json())
        write_checkpoint(folder, 5, {"tower": trained(config).state_dict()})
        list_checkpoint(folder, 5)
    values = digit_files(8)[0] if kind == "image" else invented_texts(8, seed=1)
    pq.write_table(pa.table({kind: values, "sample_id": np.arange(8)}), tmp_path / "rows.parquet")
    columns = ColumnNames(**{"image": None, kind: kind})
    raycl.embed(
        folder, tmp_path / "rows.parquet", tmp_path / "embedded", columns=columns, side=side, quiet=True
    )
    found = saved_explorer(str(folder), embeddings=str(tmp_path / "embedded"), data=None)
    client = TestClient(create_app(found, TOKEN), headers=BEARER)
    assert kind in client.get("/api/stats").json()["queries"]
    for row in (2, 5):
        by_id = client.get(f"/api/nearest?id={row}&k=4").json()["neighbors"]
        assert posted(client, kind, values[row]) == [str(row), *(each["sample_id"] for each in by_id)]


def test_columns_of_other_names_than_the_runs_are_named_as_the_refusal_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = write_run(tmp_path / "run"), tmp_path / "pictures.parquet"
    write_snapshots(folder)
    pq.write_table(pa.table({"picture": digit_files(40)[0]}), data)
    command = ("explore", folder, "--data", data)
    status, _, err = run_raycl(monkeypatch, capsys, *command)
    assert (status, "name the right one with --set data.columns.image=NAME" in err) == (2, True)
    status, _, err = run_raycl(monkeypatch, capsys, *command, "--set", "seed=1")
    assert (status, "unknown key seed" in err) == (2, True)
    apps = list[Explorer]()
    monkeypatch.setattr("raycl.serve.app.create_app", lambda explorer, _: apps.append(explorer))
    monkeypatch.setattr("uvicorn.Server.run", lambda *_, **__: None)
    named = ("--set", "data.columns.image=picture", "--port", free_ports(1)[0])
    assert run_raycl(monkeypatch, capsys, *command, *named)[0] == 0
    image = apps[0].sample(3).image
    assert image is not None and image.startswith("data:image/png")


@pytest.mark.parametrize(
    ("recipe", "role"), [("two_tower", "document"), ("two_tower", "query"), ("clip", "caption")]
)
def test_a_data_set_of_one_side_shows_its_column(recipe: str, role: str, tmp_path: Path) -> None:
    folder, texts = write_run(tmp_path / "run", method=recipe), invented_texts(8, seed=1)
    write_snapshots(folder, document=texts, query=texts, num_samples=8)
    for name in (role, "other"):
        pq.write_table(pa.table({name: texts}), tmp_path / f"{name}.parquet")
    found = saved_explorer(str(folder), embeddings=None, data=str(tmp_path / f"{role}.parquet"))
    assert [(each.role, each.text) for each in found.sample(3).texts] == [(role, texts[3])]
    with pytest.raises(DataError, match="has no column '(query|image)'; it has other"):
        saved_explorer(str(folder), embeddings=None, data=str(tmp_path / "other.parquet"))


def test_a_run_without_a_checkpoint_is_reported_before_its_encoder_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "raycl.inference.encoder", None)  # an import of it fails
    with pytest.raises(StorageError, match="has no checkpoint yet; repeat the command after its first"):
        QueryEncoder(str(tmp_path)).embed("text", "a text")


def test_an_encoder_of_its_users_own_answers_queries_by_id_alone(tmp_path: Path) -> None:
    folder, config = write_run(tmp_path / "run"), small_config("clip")
    save(config, folder)
    spec = json.loads((folder / "encoder.json").read_text())
    (folder / "encoder.json").write_text(json.dumps(spec | {"name": OWN}))
    write_snapshots(folder)
    found = saved_explorer(str(folder), embeddings=None, data=None)
    client = TestClient(create_app(found, TOKEN), headers=BEARER)
    code, detail = refusal(client.post("/api/nearest", files={"image": digit_files(1)[0][0]}))
    assert (code, "network of your own" in detail, detail.endswith("query by id")) == (400, True, True)


def test_embeddings_of_zeros_are_skipped_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = unit_rows(6, 0)
    rows[[1, 4]] = 0
    pq.write_table(
        pa.table({"sample_id": list(range(6)), "representation": list(rows)}), tmp_path / "a.parquet"
    )
    found = read_embedded(str(tmp_path), str(tmp_path))
    assert capsys.readouterr().err == f"2 embeddings in {tmp_path} are zero and were skipped\n"
    assert sorted(found.nearest_of(0, 6).sample_id.tolist()) == [2, 3, 5]
    pq.write_table(pa.table({"sample_id": [1], "representation": [[0.0, 0.0]]}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match="has no rows"):
        read_embedded(str(tmp_path), str(tmp_path))


def test_embeddings_of_several_widths_are_refused(tmp_path: Path) -> None:
    for dim in (4, 8):
        table = pa.table(
            {"sample_id": np.arange(3) + dim, "representation": list(np.ones((3, dim), np.float32))}
        )
        pq.write_table(table, tmp_path / f"{dim}.parquet")
    with pytest.raises(DataError, match="several widths"):
        read_embedded(str(tmp_path), str(tmp_path))


def test_a_damaged_snapshot_is_an_error_of_storage(called: None, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", method="instance_discrimination")
    spec = BankSpec(name="test", kind="memory_bank", dim=DIM, capacity=21, num_shards=2, output=str(folder))
    write_samples(spec, np.arange(21))
    Bank(spec, [MemoryBankActor(spec, shard) for shard in range(2)]).save(1)
    assert read_saved_bank(str(folder)).stats().rows == 21
    (folder / "bank" / "step-00000001" / "shard-1-of-2.parquet").unlink()
    with pytest.raises(StorageError):
        read_saved_bank(str(folder))


@pytest.mark.parametrize("is_recorded", [True, False])
def test_training_data_that_changed_are_not_shown(
    is_recorded: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, data = write_run(tmp_path / "run", settings={"data.image_size": 16}), tmp_path / "digits@v2?"
    write_snapshots(folder)
    data.mkdir()
    write_digits(data / "b.parquet", 30)
    write_digits(data / "c.parquet", 20)
    fingerprint = find_source(str(data)).files_fingerprint
    files = [fingerprint] if is_recorded else ()
    described = describe_data([str(data)], [50], None, streamed=False, files=files)
    (folder / "data.json").write_text(json.dumps(described))

    def is_shown() -> bool:
        return saved_explorer(str(folder), embeddings=None, data=None).samples is not None

    assert (is_shown(), capsys.readouterr().err) == (True, "")
    write_digits(data / "a.parquet", 10)
    assert not is_shown()
    assert f"ids only: the files of {data} have changed since the run" in capsys.readouterr().err
    write_digits(data / "b.parquet", 20)  # as many rows as before
    assert is_shown() is not is_recorded
    ids = pa.array(range(60))
    pq.write_table(pa.table({"image": digit_files(60)[0], "sample_id": ids}), tmp_path / "own.parquet")
    described = describe_data([str(tmp_path / "own.parquet")], [50], None, streamed=False, files=[None])
    (folder / "data.json").write_text(json.dumps(described))
    assert is_shown()  # an id of its own means one row


@pytest.mark.parametrize(
    ("described", "reason"),
    [
        ({"data": "moved.parquet"}, "moved.parquet; give a file"),
        ({"data": ["a.parquet", "b.parquet"]}, "the run has several data sets, or a Ray Dataset"),
        ({"data": None}, "the run has several data sets, or a Ray Dataset"),
        (
            {"data": "s3://images?region=eu"},
            "s3://images?region=eu is an address with options; give it by --data",
        ),
        ({}, "data.json is damaged"),
    ],
)
def test_a_line_tells_why_training_data_are_not_shown(
    described: dict[str, Any], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "run", settings={"data.image_size": 16})
    write_snapshots(folder)
    (folder / "data.json").write_text(json.dumps(described))
    assert saved_explorer(str(folder), embeddings=None, data=None).samples is None
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("the page shows ids only: ")
    assert reason in line


def test_a_click_log_is_not_shown_by_the_ids_of_its_pairs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = write_run(tmp_path / "run", method="two_tower"), invented_texts(8, seed=1)
    write_snapshots(folder, document=texts, query=texts, num_samples=8)
    pairs, data = {"query": texts, "document": texts}, str(tmp_path / "pairs.parquet")
    (folder / "data.json").write_text(json.dumps({"data": data, "num_rows": 8}))
    for columns, is_shown in ((pairs, True), (pairs | {"label": [1] * 8}, False)):
        pq.write_table(pa.table(columns), data)
        found = saved_explorer(str(folder), embeddings=None, data=None)
        assert found.stats().shows_samples == is_shown
        assert (f"shows ids only: {data} is a click log" in capsys.readouterr().err) != is_shown


def test_a_click_log_is_shown_by_the_ids_of_its_texts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, texts = write_run(tmp_path / "run", method="two_tower"), invented_texts(8, seed=1)
    write_snapshots(folder, document=texts, query=texts, num_samples=8)
    (folder / "tokenizer.json").write_text(train_tokenizer(texts, vocabulary_size=300).to_json())
    data = str(tmp_path / "pairs.parquet")
    pq.write_table(pa.table({"query": texts, "document": texts, "label": [1] * 8}), data)
    (folder / "data.json").write_text(json.dumps({"data": data, "num_rows": 8}))

    bank = read_saved_bank(str(folder))
    bank.spec = replace(bank.spec, has_text_ids=True)  # as of a queue
    monkeypatch.setattr("raycl.serve.target.read_saved_bank", lambda *_, **__: bank)
    found = saved_explorer(str(folder), embeddings=None, data=None)
    assert (found.stats().shows_samples, capsys.readouterr().err) == (True, "")


def test_a_run_does_not_choose_the_endpoint_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, read = write_run(tmp_path / "run"), list[str]()
    write_snapshots(folder)

    def missing(address: str, _: ColumnNames) -> NoReturn:
        read.append(address)
        raise DataError("there is nothing")

    monkeypatch.setattr("raycl.serve.sample_viewer.find_source", missing)
    for address in ("s3://bucket/x", "s3://key:word@bucket/x", "s3://bucket/x?endpoint_override=other"):
        (folder / "data.json").write_text(json.dumps({"data": address}))
        saved_explorer(str(folder), embeddings=None, data=None)
    assert read == ["s3://bucket/x"]


def test_a_run_without_a_bank_has_its_embedding_snapshot_and_else_an_error(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    with pytest.raises(ConfigError, match="neither a snapshot of a bank nor one of embeddings") as caught:
        saved_explorer(str(folder), embeddings=None, data=None)
    assert "\n" not in str(caught.value)
    write_snapshots(folder)
    stats = saved_explorer(str(folder), embeddings=None, data=None).bank.stats()
    assert (stats.kind, stats.filled, stats.newest_step) == ("embeddings", 60, 200)


def test_a_taken_port_and_a_missing_run_are_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run_raycl(monkeypatch, capsys, "explore", str(tmp_path / "none"))
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert "none holds no run: there is no config.yaml; give the --output of a run" in err
    write_snapshots(write_run(tmp_path / "run"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        status, out, err = run_raycl(monkeypatch, capsys, "explore", str(tmp_path / "run"), "--port", port)
    assert (status, out) == (2, "")
    without_samples, refused = err.splitlines()
    assert "ids only" in without_samples
    assert "give another --port" in refused


# ---- the page and the command


def test_the_page_and_its_docs_load_nothing_from_other_sites(opened: Open) -> None:
    client = opened()
    for path in ("/", "/docs", "/explorer.js", "/explorer.css", "/docs.js"):
        text = client.get(path).text
        assert "http://www.w3.org/2000/svg" in text or "http" not in text, path
        assert "innerHTML" not in text and " style=" not in text and "<script>" not in text


def test_the_openapi_schema_lists_every_call_and_its_token(opened: Open) -> None:
    found = opened().get("/openapi.json").json()
    calls = {(path, verb) for path, verbs in found["paths"].items() for verb in verbs}
    assert calls == {
        ("/api/stats", "get"),
        ("/api/run", "get"),
        ("/api/random", "get"),
        ("/api/nearest", "get"),
        ("/api/nearest", "post"),
        ("/api/rows/{id}", "get"),
        ("/api/samples/{id}", "get"),
    }
    for path, verb in calls:
        assert found["paths"][path][verb]["security"] == [{"HTTPBearer": []}]
    body = found["paths"]["/api/nearest"]["post"]["requestBody"]["content"]
    assert set(body) == {"multipart/form-data", "application/json"}
    assert json.dumps(found).count("#/components/schemas/Neighbors")


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--token", "short"], "a token has 16 to 512"),
        (["--port", "0"], "--port"),
        (["--port", "70000"], "--port"),
    ],
)
def test_an_invalid_flag_is_refused_in_one_line_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], flags: list[str], says: str
) -> None:
    status, out, err = run_raycl(monkeypatch, capsys, "bank", "serve", "any", *flags)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert says in err


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000/"),
        ("localhost", "http://localhost:8000/"),
        ("::1", "http://[::1]:8000/"),
        ("0.0.0.0", "http://10.0.0.7:8000/"),
        ("::", "http://10.0.0.7:8000/"),
    ],
)
def test_the_url_can_be_opened_in_a_browser(host: str, url: str) -> None:
    opened = urlsplit(serve._url(host, "10.0.0.7", 8000, "/", "a+b/c=&%"))
    assert opened._replace(fragment="").geturl() == url
    assert parse_qs(opened.fragment) == {"token": ["a+b/c=&%"]}  # as the page reads it


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_closed_terminal_ends_the_explorer_but_not_under_nohup(is_ignored: bool) -> None:
    handler = signal.SIG_IGN if is_ignored else signal.SIG_DFL
    before = signal.signal(signal.SIGHUP, handler)
    is_open = False
    try:
        with serve._until_signal():
            signal.raise_signal(signal.SIGHUP)
            is_open = True
        assert signal.getsignal(signal.SIGHUP) == handler
    finally:
        signal.signal(signal.SIGHUP, before)
    assert is_open == is_ignored


def test_a_closed_terminal_ends_the_server_without_a_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    import uvicorn
    from starlette.applications import Starlette

    server = uvicorn.Server(uvicorn.Config(Starlette(), log_level="error", port=0))

    def close_terminal() -> None:
        while not server.started:
            time.sleep(0.01)
        signal.raise_signal(signal.SIGHUP)

    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with serve._until_signal():
            threading.Thread(target=close_terminal).start()
            server.run()
    finally:
        signal.signal(signal.SIGHUP, before)
    assert capfd.readouterr() == ("closed\n", "")


def test_without_ray_serve_the_command_names_the_package_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import importlib.util

    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "fastapi" else find(name))
    status, _, err = run_raycl(monkeypatch, capsys, "bank", "serve", "any")
    assert (status, 'pip install "raycl[serve]"' in err, err.count("\n")) == (2, True, 1)
