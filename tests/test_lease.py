"""One writer per output: a second is refused while the first is alive, and takes over after its death."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path

import pytest

import raycl
from raycl import lease
from raycl.errors import ConfigError, DataError, RunError, StorageError
from raycl.lease import Lease, Writer, writing, writing_new
from raycl.records import MetricsLog
from raycl.storage import Place
from raycl.training.preflight import validate_run
from tests.conftest import BUCKET


@pytest.fixture(params=["local", "s3"])
def output(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    if request.param == "local":
        return Place(str(tmp_path / "run"))
    request.getfixturevalue("s3_server")
    return Place(f"s3://{BUCKET}/{tmp_path.name}/run")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the timeout for other machines from a minute to seconds."""
    for name, seconds in (("RENEW_S", 0.3), ("DEAD_S", 2.5), ("WATCH_S", 2.0)):
        monkeypatch.setattr(lease, name, seconds)


def writer_command(output: Place, folder: Path, where: str, hold_s: float) -> list[str]:
    files = [str(folder / name) for name in ("referee", "journal")]
    return [sys.executable, "-m", "tests.lease_writer", output.uri, *files, where, str(hold_s)]


@contextmanager
def suspended_writer(output: Place, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a writer process and suspend it while it holds the output."""
    process = subprocess.Popen(writer_command(output, folder, "here", 1))
    try:
        while not any('"is_writing": true' in (output / name).read_text() for name in claims_in(output)):
            process.send_signal(signal.SIGCONT)
            time.sleep(0.02)
            process.send_signal(signal.SIGSTOP)
        yield process
    finally:
        process.kill()
        process.wait()


def claim_of(output: Place, name: str = "other", **changes: object) -> Lease:
    """Write a claim like the one of this process with these changes; no thread renews it."""
    claim = Lease(output, output, ".writer-", f".writer-{name}", replace(Writer.here(), **changes))
    (output / claim.name).write_text(json.dumps(asdict(claim.writer)))
    return claim


@contextmanager
def renewed(claim: Lease) -> Iterator[None]:
    """Renew a claim inside the context, as its process would on its machine."""
    ended = threading.Event()
    thread = threading.Thread(target=claim._renew_until, args=(ended,))
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def claims_in(output: Place) -> list[str]:
    return [name for name in output.written_at() if ".writer-" in name]


def test_a_system_without_proc_has_writers(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(stat: str) -> list[str]:
        raise FileNotFoundError(stat)

    monkeypatch.setattr(lease, "_fields", missing)
    place = Place(str(tmp_path / "run"))
    with writing(place) as held:
        assert (held.writer.started, held.writer.is_alive()) == (None, None)
        held.check()
        with pytest.raises(ConfigError, match="has been writing to"), writing(place):
            pass


def test_a_live_writer_is_named_and_keeps_its_output(output: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["/bin/raycl", "train", "simclr"])
    with writing(output) as own:
        with (
            pytest.raises(
                ConfigError,
                match=rf"^process {os.getpid()} on \S+ \(raycl train simclr\) has been writing to .*run "
                "since 20.* UTC; stop it and repeat the command to take over, or give another --output$",
            ),
            writing(output),
        ):
            raise AssertionError("two at once")
        own.check()
        assert len(claims_in(output)) == 1
    assert not claims_in(output)


def test_refused_and_failed_runs_leave_no_folder(tmp_path: Path) -> None:
    for context in (writing(Place(str(tmp_path / "run"))), writing_new(str(tmp_path / "run"))):
        with pytest.raises(Refused), context:
            raise Refused
    assert not list(tmp_path.iterdir())


class Refused(raycl.RayclError):
    pass


def test_the_claim_of_a_killed_process_is_taken_over_immediately(output: Place, tmp_path: Path) -> None:
    with (
        suspended_writer(output, tmp_path) as process,
        pytest.raises(ConfigError, match=f"process {process.pid} "),
        writing(output),
    ):
        raise AssertionError("two at once")
    began = time.monotonic()
    with writing(output):
        assert time.monotonic() - began < 10
        assert len(claims_in(output)) == 1


def test_a_suspended_process_loses_its_output(
    output: Place, quick: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # S3 timestamps have a resolution of one second.
    monkeypatch.setattr(lease, "DEAD_S", 0.5 if output.is_local else 1.5)
    monkeypatch.setattr(lease, "WATCH_S", 0.5)
    with suspended_writer(output, tmp_path) as process:
        time.sleep(lease.DEAD_S + (0.1 if output.is_local else 1.0))
        with writing(output) as own:
            process.send_signal(signal.SIGCONT)
            assert process.wait(20) == 1  # at the check after its writes
            own.check()


def test_a_reused_process_id_counts_as_another_process(output: Place) -> None:
    claim_of(output, started="1")
    with writing(output):
        assert len(claims_in(output)) == 1


def test_a_silent_writer_on_another_machine_is_replaced_after_the_timeout(
    output: Place, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = claim_of(output, machine="another", host="node-7")
    began = time.monotonic()
    with writing(output) as own:
        assert time.monotonic() - began >= lease.WATCH_S
        assert "waiting:" in (err := capsys.readouterr().err)
        assert "on node-7" in err
        own.renew()
        with pytest.raises(RunError, match=rf"lost its lease .*now process {os.getpid()}"):
            lost.check()
        with pytest.raises(RunError, match="lost its lease"):
            lost.renew()
        assert claims_in(output) == [own.name], "renewed after it was lost"


def test_a_writer_on_another_machine_that_renews_keeps_its_output(
    output: Place, quick: None, capsys: pytest.CaptureFixture[str]
) -> None:
    far = claim_of(output, machine="another", host="node-7", is_writing=True)
    with renewed(far), pytest.raises(ConfigError, match="on node-7"), writing(output):
        raise AssertionError("two at once")
    far.check()
    assert capsys.readouterr().err.count("waiting") == 1


def test_only_one_of_two_simultaneous_writers_writes(output: Place, quick: None) -> None:
    before, after = claim_of(output, "!"), claim_of(output, "~")  # decided by name
    with renewed(before), pytest.raises(ConfigError), writing(output):
        raise AssertionError("two at once")
    (output / before.name).delete()
    threading.Timer(1.0, (output / after.name).delete).start()
    with writing(output):
        assert len(claims_in(output)) == 1


@pytest.mark.parametrize("content", [b"", b'{"version": 2}'])
def test_an_unreadable_claim_is_valid_until_its_timeout(
    tmp_path: Path, quick: None, monkeypatch: pytest.MonkeyPatch, content: bytes
) -> None:
    monkeypatch.setattr(lease, "WATCH_S", 1.0)
    monkeypatch.setattr(lease, "DEAD_S", 1.0)
    (tmp_path / ".writer-broken").write_bytes(content)
    began = time.monotonic()
    with writing(Place(str(tmp_path))):
        assert time.monotonic() - began > lease.WATCH_S
        assert len(claims_in(Place(str(tmp_path)))) == 1


@pytest.mark.parametrize("is_suspended", [False, True])
def test_a_late_renewal_loses_to_its_successor(
    is_suspended: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = Place(str(tmp_path))
    monkeypatch.setattr(lease, "RENEW_S", 0.1)
    late, write = claim_of(output, machine="another"), Lease._put
    if is_suspended:  # the machine: time.monotonic stands still
        now = count()
        monkeypatch.setattr(time, "clock_gettime", lambda _: next(now))
        monkeypatch.setattr(time, "monotonic", float)

    def put(own: Lease, *, is_writing: bool) -> None:
        if own.name == late.name:
            (output / own.name).delete()  # like a successor
            claim_of(output, "successor")
            time.sleep(0.2)
        write(own, is_writing=is_writing)

    monkeypatch.setattr(Lease, "_put", put)
    with pytest.raises(RunError, match="lost its lease"):
        late.renew()
    assert claims_in(output) == [".writer-successor"]


def test_a_writer_renews_its_claim(output: Place, quick: None) -> None:
    with writing(output) as own:
        before, until = output.written_at()[own.name], time.monotonic() + 20
        while output.written_at()[own.name] == before:
            assert time.monotonic() < until, "not renewed"
            time.sleep(0.05)


def test_an_existing_output_is_not_overwritten(output: Place) -> None:
    with writing_new(output.uri) as place:
        (place / "rows.parquet").write_bytes(b"rows")
    with pytest.raises(StorageError, match="exists already; give another --output"), writing_new(output.uri):
        raise AssertionError("written over")
    assert (output / "rows.parquet").read_bytes() == b"rows"


def test_a_folder_with_hidden_files_is_not_a_new_output(tmp_path: Path) -> None:
    (tmp_path / ".git").mkdir()
    with pytest.raises(StorageError, match="exists already"), writing_new(str(tmp_path)):
        raise AssertionError("written over")
    assert (tmp_path / ".git").exists()


def test_a_failure_is_reported_before_the_failure_to_clean_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(place: Place) -> None:
        raise StorageError("cannot remove")

    monkeypatch.setattr(Place, "remove", fail)
    with pytest.raises(Refused), writing_new(str(tmp_path / "rows")):
        raise Refused


def test_a_bucket_without_a_file_name_is_refused() -> None:
    with (
        pytest.raises(StorageError, match="is a bucket, not a file"),
        writing(Place("s3://bucket"), is_file=True),
    ):
        raise AssertionError("written")


@pytest.mark.parametrize("error", [Refused, KeyboardInterrupt])
def test_a_failed_new_output_is_removed(output: Place, error: type[BaseException]) -> None:
    with pytest.raises(error), writing_new(output.uri) as place:
        (place / "half.parquet").write_bytes(b"half")
        raise error
    with writing_new(output.uri):
        pass


def test_an_output_taken_over_by_another_process_is_not_removed(output: Place) -> None:
    with pytest.raises(Refused), writing_new(output.uri) as place:
        for name in claims_in(output):
            (place / name).delete()
        (place / "theirs.parquet").write_bytes(b"rows")
        raise Refused
    assert (output / "theirs.parquet").exists()


def test_each_file_of_a_folder_has_its_own_writer(output: Place) -> None:
    with writing(output / "a.json", is_file=True), writing(output / "b.json", is_file=True):
        with (
            pytest.raises(ConfigError, match="has been writing to"),
            writing(output / "a.json", is_file=True),
        ):
            raise AssertionError("two at once")
        assert sorted(name.split(".writer-")[0] for name in claims_in(output)) == [".a.json", ".b.json"]


def test_only_one_run_per_output_is_admitted(tmp_path: Path) -> None:
    config = raycl.recipe("simclr")
    with validate_run(config, output=str(tmp_path / "run"), resume=False) as admission:
        admission.lease.check()
        for resume in (False, True):
            with (
                pytest.raises(ConfigError, match="has been writing to"),
                validate_run(config, output=str(tmp_path / "run"), resume=resume),
            ):
                raise AssertionError("two at once")


def test_an_output_in_the_copy_of_a_submitted_folder_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray deletes the copy, and the job that continues the run has another one."""
    folder = tmp_path / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    refused = (
        re.escape(f"{folder}/runs/first lies in Ray's copy of the submitted folder")
        + ".*absolute path.*s3://"
    )
    run = validate_run(raycl.recipe("simclr"), output="runs/first", resume=True)
    with pytest.raises(ConfigError, match=refused), run:
        raise AssertionError("written")
    assert not list(folder.iterdir())
    with writing_new("model") as place:  # the job may upload it
        assert place.is_folder()


def test_a_process_without_its_lease_writes_no_metrics(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    with writing(output) as own:
        log = MetricsLog(output, check=own.check)
        log.write({"step": 1})
        log.flush()
        (output / own.name).delete()
        log.write({"step": 2})
        with pytest.raises(RunError, match="lost its lease"):
            log.flush()
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1}\n'


def test_a_node_that_does_not_see_the_output_is_named(
    output: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = Lease(output, output, ".writer-", ".writer-own", replace(Writer.here(), host="driver"))
    monkeypatch.setattr("socket.gethostname", lambda: "node")
    message = rf"^this node, node, does not see the files that driver wrote to {tmp_path}/run; give a folder that all"
    if not output.is_local:
        message = "^this process lost its lease on s3://"
    with pytest.raises(RunError, match=message) as error:
        lost.check()
    assert "\n" not in str(error.value)
    (output / "config.yaml").write_text(
        "recipe: simclr"
    )  # so the node sees the output, whose driver has ended
    with pytest.raises(RunError, match="^this process lost its lease .* the writer is now no process"):
        lost.check()
    claim_of(output)
    with pytest.raises(RunError, match="^this process lost its lease .* the writer is now process"):
        lost.check()


def wait_for_more(journal: Path) -> None:
    """Wait for the next write: a crash must not lock an output permanently."""
    size, until = journal.stat().st_size if journal.exists() else 0, time.monotonic() + 60
    while not journal.exists() or journal.stat().st_size == size:
        assert time.monotonic() < until, "no process writes"
        time.sleep(0.02)


def kill_at_random(output: Place, folder: Path, *, where: str, num_kills: int) -> None:
    """Let two processes take turns writing, kill them at random times, and check that only one writes at a time."""
    arguments, journal = writer_command(output, folder, where, 0), folder / "journal"
    writers = [subprocess.Popen(arguments, stderr=subprocess.DEVNULL) for _ in range(2)]
    try:
        for _ in range(num_kills):
            wait_for_more(journal)
            time.sleep(random.uniform(0.0, 0.5))
            number = random.randrange(2)
            assert all(writer.poll() is None for writer in writers), journal.read_text()
            writers[number].kill()
            writers[number].wait()
            writers[number] = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
    finally:
        for writer in writers:
            writer.kill()
            writer.wait()
    lines = journal.read_text().splitlines()
    assert set(lines) == {"alone"}


def test_two_processes_never_write_at_once_despite_kills(tmp_path: Path) -> None:
    output = Place(str(tmp_path / "run"))
    kill_at_random(output, tmp_path, where="here", num_kills=4)
    with writing(output):
        assert len(claims_in(output)) == 1


@pytest.mark.drill
@pytest.mark.timeout(3_600)  # takes 14 minutes for writers on two machines when this machine is busy
@pytest.mark.parametrize("where", ["here", "elsewhere"])
def test_two_processes_never_write_at_once_in_two_hundred_kills(
    output: Place, tmp_path: Path, where: str
) -> None:
    kill_at_random(output, tmp_path, where=where, num_kills=200)


def test_a_failed_output_at_a_link_empties_the_folder_and_keeps_the_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    with pytest.raises(DataError), writing_new(str(tmp_path / "link")) as place:
        (place / "part.parquet").write_text("rows")
        raise DataError("too many invalid rows")
    assert (tmp_path / "link").is_symlink()
    assert list((tmp_path / "disk").iterdir()) == []
