"""Places and records on a local disk; S3 has its own test file."""

import contextlib
import io
import json
import os
import re
import resource
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raycl.errors import ConfigError, StorageError
from raycl.records import MetricsLog, read_metrics, read_result, write_result
from raycl.storage import Place, absolute


def test_a_path_of_an_unknown_user_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/me")
    names = ("~/photos", "~nobody-has-this-name/photos", "photos", "/photos")
    expected = [
        "/home/me/photos",
        f"{tmp_path}/~nobody-has-this-name/photos",
        f"{tmp_path}/photos",
        "/photos",
    ]
    assert [absolute(each) for each in names] == expected


def test_files_are_listed_sorted_and_without_hidden_files(tmp_path: Path) -> None:
    for name in ("b/2.txt", "a/1.txt", ".hidden/x", "b/_partial"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    assert Place(str(tmp_path)).files() == [("a/1.txt", 1), ("b/2.txt", 1)]


@pytest.mark.parametrize(
    ("link", "target"), [("data/a/up", "data"), ("data/a/all", ""), ("elsewhere/back", "data")]
)
def test_links_are_followed_but_not_in_circles(link: str, target: str, tmp_path: Path) -> None:
    for name in ("data/a/1.txt", "elsewhere/2.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text("x")
    (tmp_path / "data" / "3.txt").symlink_to(tmp_path / "elsewhere" / "2.txt")
    (tmp_path / "data" / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / link).symlink_to(tmp_path / target)
    files = Place(str(tmp_path / "data")).files()
    assert files == [("3.txt", 1), ("a/1.txt", 1), ("linked/2.txt", 1)]


def test_a_link_without_its_file_is_listed(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "b.txt").symlink_to("nothing")
    (tmp_path / "c.txt").symlink_to("c.txt")
    os.mkfifo(tmp_path / "d.txt")
    assert Place(str(tmp_path)).files() == [("a.txt", 1), ("b.txt", 0), ("c.txt", 0)]


@pytest.mark.parametrize("name", [b"caf\xe9.txt", b"caf\xe9/a.txt"])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(name: bytes, tmp_path: Path) -> None:
    path = os.path.join(os.fsencode(tmp_path), b"data", name)
    os.makedirs(os.path.dirname(path))
    with open(path, "wb"):
        pass
    message = re.escape(
        f"{tmp_path / 'data'} holds a file whose name is not UTF-8 ({name.split(b'/')[0]!r}); rename it"
    )
    for list_files in (Place.files, Place.entries):
        with pytest.raises(StorageError, match=f"^{message}$"):
            list_files(Place(str(tmp_path / "data")))


def test_a_relative_path_is_below_the_working_folder_of_the_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b"):
        (tmp_path / name / "run").mkdir(parents=True)
        (tmp_path / name / "run" / "x.txt").write_text(name)
    for name in ("a", "b"):
        monkeypatch.chdir(tmp_path / name)
        assert (Place("run") / "x.txt").read_text() == name


def test_names_below_a_place_may_contain_any_character(tmp_path: Path) -> None:
    place = Place(str(tmp_path)) / "a b#c%20?.txt"
    place.write_text("x")
    assert Place(str(tmp_path)).files() == [("a b#c%20?.txt", 1)]
    assert place.read_text() == "x"


def test_a_file_is_replaced_atomically_without_leftovers(tmp_path: Path) -> None:
    place = Place(str(tmp_path)) / "deep" / "x.json"
    place.write_text("old")
    place.write_text("new")
    assert place.read_text() == "new"
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["x.json"]


def test_a_write_that_fails_halfway_keeps_the_old_file(tmp_path: Path) -> None:
    place = Place(str(tmp_path)) / "x.json"
    place.write_text("old")
    with largest_file(1_024), pytest.raises(StorageError, match="cannot write .*too large"):
        place.write_bytes(bytes(10_000))
    assert place.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_an_object_that_is_uploaded_as_a_whole_stays_after_an_interrupt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    objects = {"b/x.json": b"old"}

    @contextlib.contextmanager
    def open_output_stream(path: str, **_: Any) -> Iterator[io.BytesIO]:
        stream = io.BytesIO()
        try:
            yield stream
        finally:
            objects[path] = stream.getvalue()
        raise KeyboardInterrupt  # Python handles a signal only after the call that uploads

    filesystem = SimpleNamespace(open_output_stream=open_output_stream, delete_file=objects.pop)
    monkeypatch.setattr("raycl.storage._open_remote", lambda _: (filesystem, "b/x.json"))
    with pytest.raises(KeyboardInterrupt):
        Place("s3://b/x.json").write_text("new")
    assert objects == {"b/x.json": b"new"}
    with pytest.raises(ZeroDivisionError), Place("s3://b/x.json").create() as stream:
        stream.write(b"ha")
        raise ZeroDivisionError
    assert objects == {}


@contextlib.contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Make writes beyond this file size fail, as on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


def test_a_missing_file_is_a_one_line_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot read .*nothing") as caught:
        (Place(str(tmp_path)) / "nothing").read_bytes()
    assert "\n" not in str(caught.value)


@pytest.fixture
def full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make the next partial file ``/dev/full``, where every write fails with ENOSPC."""
    monkeypatch.setattr("raycl.storage.uuid.uuid4", lambda: SimpleNamespace(hex="new"))
    (tmp_path / ".result.json.new").symlink_to("/dev/full")
    return tmp_path


def test_a_result_on_a_full_disk_overwrites_the_old_one(full_disk: Path) -> None:
    (full_disk / "result.json").write_text(json.dumps({"status": "running", "padding": "x" * 200}))
    failed = {"status": "failed", "error": "no space left"}
    write_result(Place(str(full_disk)), failed)
    assert read_result(Place(str(full_disk))) == failed


def test_a_first_result_on_a_full_disk_is_an_error(full_disk: Path) -> None:
    with pytest.raises(StorageError, match="cannot write .*No space left"):
        write_result(Place(str(full_disk)), {"status": "running"})
    assert not (full_disk / "result.json").exists()


def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="cannot write"):
        (Place(str(tmp_path)) / "file" / "below").check_writable()


def test_an_unknown_scheme_is_refused() -> None:
    with pytest.raises(StorageError, match="ftp://x"):
        Place("ftp://x/y").exists()


def test_an_address_that_pathlib_has_shortened_is_refused() -> None:
    for use in (absolute, lambda address: Place(os.fspath(address)).exists()):
        with pytest.raises(
            StorageError,
            match="'s3:/bucket/x': it has one slash .*; give a local path, or an address as text",
        ):
            use(Path("s3://bucket/x"))
    with pytest.raises(ConfigError, match="contains credentials") as caught:
        absolute(Path("s3://KEY:SECRET@bucket/x"))
    assert ":SECRET@" not in str(caught.value)
    for local in ("a:b/c", "C:/x"):
        assert absolute(local).endswith(f"/{local}")


def test_a_resumed_run_drops_the_metrics_after_its_checkpoint(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    log = MetricsLog(output)
    for step in (10, 20, 30):
        log.write({"step": step, "loss": 1.0 / 3.0})
    log.flush()
    resumed = MetricsLog(output, resume_step=20)
    resumed.write({"step": 30, "loss": float("nan")})
    resumed.flush()
    assert read_metrics(output) == [
        {"step": 10, "loss": 0.333333},
        {"step": 20, "loss": 0.333333},
        {"step": 30, "loss": None},
    ]


@pytest.mark.parametrize(
    ("resume_step", "num_rollbacks", "num_kept"), [(15, 1, 6), (5, 1, 4), (10, 0, 2), (10, 2, 8), (0, 1, 4)]
)
def test_the_metrics_before_a_rollback_are_kept_when_the_run_is_resumed(
    tmp_path: Path, resume_step: int, num_rollbacks: int, num_kept: int
) -> None:
    lines: list[dict[str, Any]] = [{"step": step} for step in (5, 10, 15)]
    lines += [{"step": 5, "event": "rollback"}, *({"step": step} for step in (10, 15, 20))]
    lines += [{"step": 10, "event": "rollback"}]
    output = Place(str(tmp_path))
    log = MetricsLog(output)
    for line in lines:
        log.write(line)
    log.flush()
    MetricsLog(output, resume_step=resume_step, num_rollbacks=num_rollbacks).flush()
    assert read_metrics(output) == lines[:num_kept]


def test_a_run_resumed_from_its_checkpoint_of_step_0_keeps_the_first_evaluation(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    log = MetricsLog(output)
    for step in (0, 1, 2):
        log.write({"step": step, "knn_top1": 0.1})
    log.flush()
    MetricsLog(output, resume_step=0).flush()
    assert [line["step"] for line in read_metrics(output)] == [0]


def test_a_run_that_starts_over_before_its_first_checkpoint_keeps_its_failures(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    failure = {"step": 0, "event": "failure", "text": "worker 1 died", "failed_at": 190}
    log = MetricsLog(output)
    for line in ({"step": 0, "knn_top1": 0.1}, failure, {"step": 1, "loss": 0.5}):
        log.write(line)
    log.flush()
    again = MetricsLog(output)
    again.flush()
    assert read_metrics(output) == [failure]
    assert again.failed_at == {190}
    # Its checkpoints were moved away: the failure of a later step stays, also when the run is resumed.
    log.write({**failure, "step": 50, "failed_at": 200})
    log.flush()
    MetricsLog(output).flush()
    MetricsLog(output, resume_step=10).flush()
    assert read_metrics(output) == [failure, {**failure, "failed_at": 200}]


def test_a_new_run_discards_old_metrics(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    log = MetricsLog(output)
    log.write({"step": 2})
    log.flush()
    assert read_metrics(output) == [{"step": 2}]


def test_checking_a_new_place_leaves_no_folder(tmp_path: Path) -> None:
    Place(str(tmp_path / "new")).check_writable()
    assert not (tmp_path / "new").exists()
    Place(str(tmp_path)).check_writable()
    assert tmp_path.exists()


def test_a_binary_file_read_as_text_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_bytes(b"\xff\xfe\x00binary")
    with pytest.raises(StorageError, match="is not text; give a file in UTF-8"):
        Place(str(tmp_path / "run.yaml")).read_text()


def test_the_endpoint_stays_at_the_end_of_an_address_and_out_of_names() -> None:
    place = Place("s3://bucket/runs/first/?scheme=http&endpoint_override=127.0.0.1:9000")
    assert place.name == "first"
    below = place / "checkpoints" / "why?.txt"
    assert below.name == "why?.txt"
    assert below.uri == (
        "s3://bucket/runs/first/checkpoints/why?.txt?scheme=http&endpoint_override=127.0.0.1:9000"
    )
    assert below.resolve()[1] == "bucket/runs/first/checkpoints/why?.txt"
    assert (Place("/data/what?/now") / "x").uri == "/data/what?/now/x"


@pytest.mark.parametrize("name", ["my data", "données/日本", "run#1", "a+b", "label=0", "[a]", "{b}"])
def test_a_remote_address_may_have_any_letters(name: str) -> None:
    options = "?scheme=http&endpoint_override=127.0.0.1:9000"
    assert Place(f"s3://bucket/{name}/x{options}").resolve()[1] == f"bucket/{name}/x"
    assert Place(f"s3://bucket/my%20data%3F{options}").resolve()[1] == "bucket/my data?"


def test_an_error_without_details_names_the_cause_and_the_remedy() -> None:
    error = Place("s3://bucket/x").failure(
        "read", OSError("AWS Error ACCESS_DENIED during GetObject operation: ")
    )
    assert str(error) == (
        "cannot read 's3://bucket/x': AWS Error ACCESS_DENIED during GetObject operation; "
        "allow it to the role or key that raycl uses"
    )
