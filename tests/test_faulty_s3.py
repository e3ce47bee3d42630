"""Reading from and writing to S3 through a proxy that throttles, truncates, denies and disconnects."""

import gzip
import io
import json
import pickle
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl import storage
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.images import InvalidImageError
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError, StorageError
from raycl.negatives.snapshot import write_rows
from raycl.negatives.store import Negatives
from raycl.records import MetricsLog, read_metrics
from raycl.storage import Place, with_retries
from tests.faulty_s3 import FaultyS3

ATTEMPTS = 4  # with waits of 0.175 s in all


@pytest.fixture(autouse=True)
def attempts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", str(ATTEMPTS))


@pytest.fixture
def s3(s3_server: str) -> Iterator[FaultyS3]:
    """A new proxy for each test: no cached filesystem uses it."""
    with FaultyS3(s3_server) as faulty:
        yield faulty


def content(num_bytes: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed).bytes(num_bytes)


def one_line(error: pytest.ExceptionInfo[StorageError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def write_table(place: Place, num_rows: int = 600) -> None:
    """Write rows of incompressible bytes, in groups of 100."""
    rows = [content(500, seed) for seed in range(num_rows)]
    table = pa.table({"image": pa.array(rows, pa.binary()), "label": range(num_rows)})
    sink = pa.BufferOutputStream()
    pq.write_table(table, sink, row_group_size=100, compression="none", use_dictionary=False)
    place.write_bytes(sink.getvalue().to_pybytes())


def values_of(source: Source) -> list[Any]:
    return [
        value
        for fragment in source.fragments
        for rows in source.read(fragment)
        for value in rows.values["image"]
    ]


@pytest.mark.parametrize("seed", range(2))
def test_reads_despite_faults_return_the_written_data(
    s3_server: str, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "10")
    written = {f"{index:02}.bin": content(3_000, index) for index in range(12)}
    with FaultyS3(s3_server, seed=seed) as s3:
        place = Place(s3.uri(f"through/{seed}"))
        s3.add("throttled", prefix="through", fraction=0.15)
        s3.add("away", prefix="through", fraction=0.15)
        s3.add("cut", methods="GET", prefix="through", fraction=0.15, after=1_700)
        for name, each in written.items():
            (place / name).write_bytes(each)
        assert {name: (place / name).read_bytes() for name, _ in place.files()} == written
        assert s3.count() - s3.count("ok") > 5


def test_a_read_that_keeps_failing_reports_the_number_of_attempts(s3: FaultyS3) -> None:
    place = Place(s3.uri("limit/x.bin"))
    place.write_bytes(content(1_000))
    faults: tuple[Any, ...] = ("throttled", "away", "cut")
    for fault in faults:
        s3.add(fault, methods="GET", prefix="limit", after=10)
        with pytest.raises(
            StorageError, match=f"cannot read .*limit/x.bin.*tried {ATTEMPTS} times"
        ) as caught:
            place.read_bytes()
        one_line(caught)
        assert ATTEMPTS <= s3.count(fault) <= ATTEMPTS + 1  # curl itself retries on a new connection
        s3.heal()
    assert place.read_bytes() == content(1_000)


def test_a_denied_request_is_not_retried(s3: FaultyS3) -> None:
    place = Place(s3.uri("denied/x.bin"))
    place.write_bytes(b"secret")
    s3.add("denied", prefix="denied")
    for ask in (place.read_bytes, place.exists, place.files, lambda: place.write_bytes(b"new")):
        before = s3.count("denied")
        with pytest.raises(StorageError, match="allow it to the role or key") as caught:
            ask()
        assert "tried" not in one_line(caught)
        assert s3.count("denied") - before == 1
    s3.heal()
    assert place.read_bytes() == b"secret"


def test_reading_a_file_shorter_than_an_error_response_is_retried_or_denied(s3: FaultyS3) -> None:
    for num_bytes in (1, 100):
        place = Place(s3.uri(f"tiny/{num_bytes}"))
        place.write_bytes(content(num_bytes))
        s3.add("throttled", methods="GET", prefix="tiny", times=ATTEMPTS - 1)
        assert place.read_bytes() == content(num_bytes)
        assert s3.count("throttled") == ATTEMPTS - 1
        s3.add("throttled", methods="GET", prefix="tiny")
        with pytest.raises(StorageError, match=f"tried {ATTEMPTS} times") as caught:
            place.read_bytes()
        one_line(caught)
        assert s3.count("throttled") == 2 * ATTEMPTS - 1
        s3.heal()
    with Place(s3.uri("tiny/100")).open() as file:
        s3.add("denied", prefix="tiny")
        with pytest.raises(OSError, match="ACCESS_DENIED"):
            file.read(50)
        assert s3.count("denied", method="GET") == 1


def test_many_faults_do_not_use_up_the_retries(s3: FaultyS3) -> None:
    place = Place(s3.uri("patience"))
    for index in range(130):
        s3.add("throttled", prefix=f"patience/{index:03}", times=1)
    with ThreadPoolExecutor(8) as pool:
        assert not any(pool.map(lambda index: (place / f"{index:03}").exists(), range(130)))
    assert s3.count("throttled") == 130  # pyarrow's standard strategy has only 100 retries


def test_a_pickled_filesystem_keeps_its_number_of_retries(s3: FaultyS3) -> None:
    filesystem, path = Place(s3.uri("pickled/x.bin")).resolve()
    s3.add("throttled", methods="PUT", prefix="pickled", times=ATTEMPTS - 1)
    with pickle.loads(pickle.dumps(filesystem)).open_output_stream(path) as stream:
        stream.write(b"checkpoint")
    assert s3.count("throttled", method="PUT") == ATTEMPTS - 1
    assert Place(s3.uri("pickled/x.bin")).read_bytes() == b"checkpoint"


def test_reads_and_writes_wait_until_an_outage_ends(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "8")
    output = Place(s3.uri("outage"))
    log = MetricsLog(output)
    s3.go_away(0.6)
    log.write({"step": 1})
    log.flush()
    assert s3.count("away") > 2
    s3.go_away(0.6)
    assert read_metrics(output) == [{"step": 1}]


def test_retries_last_longer_than_a_minute(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "7")
    s3.add("throttled", prefix="waits")
    started = time.monotonic()
    with pytest.raises(StorageError):
        Place(s3.uri("waits")).read_bytes()
    assert s3.count("throttled") == 7
    assert time.monotonic() - started > sum(storage.backoff_s()) > 1.5
    monkeypatch.delenv("AWS_MAX_ATTEMPTS")
    assert sum(storage.backoff_s()) > 60


def test_a_request_to_a_server_that_hangs_is_retried(s3: FaultyS3, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "REQUEST_TIMEOUT_S", 1.0)
    place = Place(s3.uri("hangs/x.bin"))
    place.write_bytes(b"x")
    s3.add("slow", methods="GET", prefix="hangs", times=1, seconds=30)
    started = time.monotonic()
    assert place.read_bytes() == b"x"
    assert time.monotonic() - started < 8


def test_a_slow_response_is_not_retried(s3: FaultyS3) -> None:
    place = Place(s3.uri("slow/x.bin"))
    place.write_bytes(b"x")
    s3.add("slow", methods="GET", prefix="slow", seconds=3.6)  # pyarrow waits for 3 s
    assert place.read_bytes() == b"x"
    assert s3.count("slow") == 1


@pytest.mark.parametrize("num_bytes", [1_000, 12 * 2**20])
@pytest.mark.parametrize("fault", ["throttled", "denied", "away"])
def test_a_failed_write_keeps_the_old_file(s3: FaultyS3, fault: Any, num_bytes: int) -> None:
    name = f"writes/{fault}/{num_bytes}.bin"
    place = Place(s3.uri(name))
    place.write_bytes(b"old")
    puts = s3.count("ok", method="PUT")
    s3.add(fault, methods="PUT", prefix=name)
    with pytest.raises(StorageError, match="cannot write") as caught:
        place.write_bytes(content(num_bytes))
    one_line(caught)
    assert s3.count("ok", method="PUT") == puts
    s3.heal()
    assert place.read_bytes() == b"old"


def test_a_failed_stream_of_rows_keeps_the_old_file(s3: FaultyS3) -> None:
    place, ids = Place(s3.uri("rows.parquet")), np.arange(20_000)
    write_rows(place, Negatives(np.full((20_000, 64), 1, np.float32), ids, ids), {})
    s3.add("denied", methods="PUT POST", prefix="rows.parquet")
    with pytest.raises(StorageError, match="cannot write") as caught:
        write_rows(place, Negatives(np.full((20_000, 64), 2, np.float32), ids, ids), {})
    one_line(caught)
    s3.heal()
    held = pq.read_table(io.BytesIO(place.read_bytes()))
    assert (held["embedding"].combine_chunks().values.to_numpy() == 1.0).all()


@pytest.mark.parametrize("num_bytes", [1_000, 12 * 2**20])
def test_a_write_with_a_lost_response_is_retried(s3: FaultyS3, num_bytes: int) -> None:
    place = Place(s3.uri(f"lost/{num_bytes}.bin"))
    s3.add("lost", methods="PUT", prefix="lost", times=2)
    place.write_bytes(content(num_bytes))
    assert place.read_bytes() == content(num_bytes)
    assert s3.count("lost") == 2
    # A small object is written atomically in one request.
    assert num_bytes > 1_000 or s3.count() == s3.count(method="PUT") + 2 == 5


def test_a_truncated_response_is_retried_and_then_reported(s3: FaultyS3) -> None:
    place = Place(s3.uri("short/x.bin"))
    place.write_bytes(content(1_000))
    for times in (1, 2):  # one response, or both responses of a replaced file
        s3.add("short", methods="GET", prefix="short", times=times, after=999)
        assert place.read_bytes() == content(1_000)
    s3.add("short", methods="GET", prefix="short", times=1, after=99)
    with place.open() as file:
        file.seek(500)
        assert file.read(100) == content(1_000)[500:600]
    s3.add("short", methods="GET", prefix="short", after=600)
    with pytest.raises(StorageError, match="fewer bytes than requested") as caught:
        place.read_bytes()
    one_line(caught)


def test_a_complete_file_with_any_last_byte_is_accepted(s3: FaultyS3) -> None:
    place = Place(s3.uri("ends.gz"))  # not compressed by its name
    for end in (b"", b"\0", b"\x5a", b"\xa5", b"\xff", b"\xa5\x5a", b"\x5a\xa5"):
        place.write_bytes(end)
        assert place.read_bytes() == end


@pytest.mark.parametrize("fault", ["throttled", "denied", "away", "cut", "short"])
def test_an_unreadable_table_is_a_storage_error(s3: FaultyS3, fault: Any) -> None:
    place = Place(s3.uri(f"tables/{fault}.parquet"))
    write_table(place)
    source = find_source(place.uri)
    rows = source.read(source.fragments[0])
    next(rows)
    s3.add(fault, methods="GET", prefix="tables", after=700)
    with pytest.raises(StorageError) as caught:
        list(rows)
    assert place.uri in one_line(caught)


@pytest.mark.parametrize("ending", ["csv", "tsv.gz", "jsonl", "jsonl.gz"])
@pytest.mark.parametrize("fault", ["throttled", "denied", "away", "cut", "short"])
def test_an_unreadable_text_file_is_a_storage_error(s3: FaultyS3, fault: Any, ending: str) -> None:
    place = Place(s3.uri(f"texts/{fault}.{ending}"))
    texts = [content(300, seed).hex() for seed in range(300)]
    lines = [json.dumps({"text": text}) for text in texts] if "jsonl" in ending else ["text", *texts]
    whole = "".join(f"{line}\n" for line in lines).encode()
    place.write_bytes(gzip.compress(whole) if ending.endswith(".gz") else whole)
    columns = ColumnNames(image=None, text="text")
    source = find_source(place.uri, columns)
    rows = [value for each in source.read(source.fragments[0]) for value in each.values["text"]]
    assert rows == [text.encode() for text in texts]
    s3.add(fault, methods="GET", prefix="texts", after=700)
    for attempt in (lambda: list(source.read(source.fragments[0])), lambda: find_source(place.uri, columns)):
        with pytest.raises(StorageError) as caught:
            attempt()
        assert place.uri in one_line(caught)


def test_all_columns_of_a_row_group_are_read_in_one_request(s3: FaultyS3) -> None:
    place = Place(s3.uri("tables/requests.parquet"))
    write_table(place)
    source = find_source(place.uri)
    assert source.has_labels
    s3.heal()
    assert len(values_of(source)) == 600
    assert s3.count(method="GET") == 1 + 6  # the footer, and the groups


def test_a_damaged_table_is_a_data_error(s3: FaultyS3) -> None:
    place = Place(s3.uri("tables/damaged.parquet"))
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"image": [b"one", b"two"] * 500}), sink, compression="snappy")
    table = bytearray(sink.getvalue().to_pybytes())
    table[40:80] = b"\xff" * 40
    place.write_bytes(bytes(table))
    with pytest.raises(DataError, match="cannot read .*damaged.parquet.* as parquet") as caught:
        values_of(find_source(place.uri))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["throttled", "denied", "away", "cut", "short"])
def test_an_unreadable_image_is_a_storage_error(s3: FaultyS3, fault: Any) -> None:
    folder = Place(s3.uri(f"images/{fault}"))
    for index in range(6):
        (folder / f"{index:02}.png").write_bytes(content(2_000, index))
    source = find_source(folder.uri)
    s3.add(fault, methods="GET", prefix=f"images/{fault}/03", after=700)
    with pytest.raises(StorageError, match=f"images/{fault}/03.png") as caught:
        values_of(source)
    one_line(caught)


def test_a_deleted_image_is_an_invalid_row(s3: FaultyS3) -> None:
    folder = Place(s3.uri("images/gone"))
    for index in range(6):
        (folder / f"{index:02}.png").write_bytes(content(2_000, index))
    source = find_source(folder.uri)
    filesystem, path = (folder / "04.png").resolve()
    filesystem.delete_file(path)
    s3.add("throttled", prefix="images/gone", fraction=0.2)
    values = values_of(source)
    assert isinstance(values[4], InvalidImageError)
    assert str(values[4]) == "file not found"
    del values[4]
    assert values == [content(2_000, index) for index in range(6) if index != 4]


def test_looking_up_the_region_of_a_bucket_is_retried() -> None:
    calls: list[OSError] = []

    def fail(text: str) -> None:
        calls.append(OSError(text))
        raise calls[-1]

    # pyarrow's message for a bucket on AWS, which tests cannot query.
    where = "When resolving region for bucket 'b': AWS Error"
    with pytest.raises(OSError):
        with_retries(lambda: fail(f"{where} NETWORK_CONNECTION during HeadBucket operation: curlCode: 6"))
    assert len(calls) == ATTEMPTS
    with pytest.raises(OSError):
        with_retries(lambda: fail(f"{where} ACCESS_DENIED during HeadBucket operation: No response body."))
    assert len(calls) == ATTEMPTS + 1
    assert with_retries(lambda: "us-east-1") == "us-east-1"


def test_an_invalid_number_of_attempts_is_refused(monkeypatch: pytest.MonkeyPatch, s3: FaultyS3) -> None:
    for number in ("0", "17", "many", "-1", "1.5"):
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", number)
        with pytest.raises(
            ConfigError, match=f"AWS_MAX_ATTEMPTS must be a number from 1 to 16, came '{number}'"
        ):
            Place(s3.uri("x")).exists()


def test_one_attempt_sends_one_request(monkeypatch: pytest.MonkeyPatch, s3: FaultyS3) -> None:
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")
    place = Place(s3.uri("once/x"))
    s3.add("throttled", prefix="once")
    with pytest.raises(StorageError, match="tried once"):
        place.read_bytes()
    assert s3.count() == 1
