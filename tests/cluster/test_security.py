"""Security of clusters started by raycl and by others: addresses and tokens."""

import ipaddress
import json
import os
import stat
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from raycl.records import read_result
from raycl.storage import Place
from tests.cluster.test_run import small_run
from tests.images import write_digits
from tests.malicious_files import as_checkpoint
from tests.ports import free_ports

ROOT = Path(__file__).parent.parent.parent
TOKEN = "a1" * 32
OF_RAY = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_ADDRESS", "RAY_JOB_ID")

# Starts Ray like `raycl train`, with one worker, and prints its address; ends with its input.
HOLDER = """
import json, sys
import ray
from raycl.ray_runtime import connect_cluster
connect_cluster()
ray.get(ray.remote(num_cpus=0)(lambda: 0).remote())
print(json.dumps(ray.get_runtime_context().gcs_address), flush=True)
sys.stdin.read()
ray.shutdown()
"""


@dataclass(frozen=True)
class OwnRay:
    """A Ray cluster of a separate process, and the home folder of its user."""

    address: str
    home: Path
    pid: int


def environment(home: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user with this home folder, without the tests' Ray settings."""
    usual = {name: value for name, value in os.environ.items() if name not in OF_RAY}
    return usual | {"HOME": str(home), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)} | more


def raycl(home: Path, *arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
    """Run a raycl command as this user."""
    return subprocess.run(
        [sys.executable, "-c", "from raycl.cli.main import main; main()", *map(str, arguments)],
        env=environment(home, **more),
        cwd=home,
        capture_output=True,
        text=True,
        timeout=200,
    )


@pytest.fixture(scope="module")
def own_ray() -> Iterator[OwnRay]:
    """Let raycl start Ray for a user without any settings."""
    # Socket paths have at most 107 characters.
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        home = Path(folder)
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLDER],
            env=environment(home, RAY_TMPDIR=folder),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            umask=0o022,
        )
        assert holder.stdin is not None and holder.stdout is not None
        try:
            yield OwnRay(address=json.loads(holder.stdout.readline()), home=home, pid=holder.pid)
        finally:
            holder.stdin.close()
            holder.wait(60)


def family(pid: int) -> set[int]:
    """Return a process and all its descendants."""
    parents = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(status.parent.name)] = int(status.read_text().rpartition(") ")[2].split()[1])
        except OSError:
            continue  # the process has ended
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def listening(pids: set[int]) -> dict[str, str]:
    """Map the addresses and ports where these processes listen to their names."""
    names = {}
    for pid in pids:
        for file in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                names[os.readlink(file)] = Path(f"/proc/{pid}/comm").read_text().strip()
            except OSError:
                continue
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            name = names.get(f"socket:[{fields[9]}]")
            if fields[3] == "0A" and name:
                host, port = fields[1].split(":")
                words = [bytes.fromhex(host[at : at + 8])[::-1] for at in range(0, len(host), 8)]
                found[f"{ipaddress.ip_address(b''.join(words))} {int(port, 16)}"] = name
    return found


def is_loopback(where: str) -> bool:
    address = ipaddress.ip_address(where.split()[0])
    inner = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return (inner or address).is_loopback


def assert_refused_in_one_line(done: subprocess.CompletedProcess[str]) -> None:
    lines = [line for line in done.stderr.splitlines() if line.startswith("raycl: ")]
    assert done.returncode == 1, done.stderr
    assert len(lines) == 1, done.stderr
    assert "it asks for a token: set RAY_AUTH_MODE=token" in lines[0]
    assert "Traceback" not in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
def test_a_ray_cluster_started_by_raycl_listens_only_on_the_loopback(own_ray: OwnRay) -> None:
    found = listening(family(own_ray.pid))
    assert {"gcs_server", "raylet"} <= set(found.values())
    assert len(found) >= 5
    assert [where for where in found if not is_loopback(where)] == []
    assert own_ray.address.startswith("127.0.0.1:")


def test_the_token_is_private_to_its_user_and_needs_no_settings(own_ray: OwnRay, tmp_path: Path) -> None:
    token = own_ray.home / ".ray" / "auth_token"
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    named = own_ray.address.replace("127.0.0.1", "localhost")
    asked = raycl(own_ray.home, "bank", "list", "--address", named)
    assert (asked.returncode, "no banks found" in asked.stdout) == (0, True), asked.stderr
    assert_refused_in_one_line(raycl(tmp_path, "bank", "list", "--address", own_ray.address))
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b2" * 32}
    assert_refused_in_one_line(raycl(tmp_path, "bank", "stats", "any", "--address", own_ray.address, **wrong))


# ---- a cluster of another user, with a token


@dataclass(frozen=True)
class Head:
    """The head of a cluster, with a dashboard."""

    address: str
    dashboard: str
    token: Path


def answers(url: str, token: str | None = None) -> int:
    """Return the status of a GET request, 0 if nothing listens."""
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with tempfile.TemporaryDirectory(prefix="rcl", dir="/tmp", ignore_cleanup_errors=True) as folder:
        token = Path(folder) / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        port, dashboard, client = free_ports(3)
        settings = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # the head's address is the loopback
        }
        command = ["start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}", "--num-cpus=4"]
        command += ["--include-dashboard=true", f"--dashboard-port={dashboard}", "--dashboard-host=127.0.0.1"]
        command += [f"--dashboard-agent-listen-port={client}", "--object-store-memory=200000000"]
        process = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", *command],
            env=environment(Path(folder), **settings),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            url = f"http://127.0.0.1:{dashboard}"
            deadline = time.monotonic() + 120
            while answers(f"{url}/api/version", TOKEN) != 200:
                assert time.monotonic() < deadline, "no dashboard came"
                assert process.poll() is None, "the head has ended"
                time.sleep(0.5)
            yield Head(address=f"127.0.0.1:{port}", dashboard=url, token=token)
        finally:
            process.terminate()  # with --block all its processes end with it
            process.wait(60)


@pytest.mark.drill
def test_a_dashboard_requires_the_token(head: Head) -> None:
    # A harmless request, and requests that would run code or expose secrets.
    for path in ("/api/version", "/api/jobs/", "/nodes?view=summary", "/api/v0/actors", "/logical/actors"):
        assert answers(head.dashboard + path) == 401, path
        assert answers(head.dashboard + path, "b2" * 32) == 403, path
        assert answers(head.dashboard + path, TOKEN) == 200, path


@pytest.mark.drill
def test_queries_and_runs_require_the_token(head: Head, tmp_path: Path) -> None:
    data = write_digits(tmp_path / "digits.parquet", 64)
    flags = ["--data", data, "--steps", 1, "--batch-size", 32, "--set", "data.image_size=16"]
    doors = (
        ["bank", "list", "--address", head.address],
        ["bank", "stats", "any", "--address", head.address],
        ["train", "simclr", "--output", tmp_path / "run", "--address", head.address, *flags],
    )
    wrong = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "b2" * 32}
    for door in doors:
        for settings in ({}, wrong):
            started = time.monotonic()
            assert_refused_in_one_line(raycl(tmp_path, *door, **settings))
            assert time.monotonic() - started < 100
    right = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(head.token)}
    asked = raycl(tmp_path, *doors[0], **right)
    assert (asked.returncode, "no banks found" in asked.stdout) == (0, True), asked.stderr


@pytest.mark.drill
def test_a_job_is_submitted_only_with_the_token(head: Head, tmp_path: Path) -> None:
    def submit(**settings: str) -> subprocess.CompletedProcess[str]:
        entry = [sys.executable, "-c", "from raycl.cli.main import main; main()", "bank", "list"]
        command = ["job", "submit", "--address", head.dashboard, "--", *entry]
        return subprocess.run(
            [sys.executable, "-m", "ray.scripts.scripts", *command],
            env=environment(tmp_path, **settings),
            capture_output=True,
            text=True,
            timeout=200,
        )

    assert submit().returncode != 0
    assert submit(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN="b2" * 32).returncode != 0
    done = submit(RAY_AUTH_MODE="token", RAY_AUTH_TOKEN_PATH=str(head.token))
    assert (done.returncode, "no banks found" in done.stdout) == (0, True), done.stdout + done.stderr


# ---- a replaced checkpoint


@pytest.mark.drill
@pytest.mark.usefixtures("ray_cluster")
def test_a_resumed_run_does_not_execute_its_checkpoint(tmp_path: Path) -> None:
    import raycl as package
    from raycl.errors import StorageError

    marker = tmp_path / "executed"
    data, output = write_digits(tmp_path / "digits.parquet", 150), tmp_path / "run"
    config = small_run(workers=1)
    package.train(config, data=str(data), output=str(output), quiet=True)
    for state in output.glob("checkpoints/*/state.pt"):
        state.write_bytes(as_checkpoint(marker))
    longer = package.override(config, {"stages.0.epochs": 3})
    with pytest.raises(StorageError, match="state.pt: .*which raycl never loads"):
        package.train(longer, data=str(data), output=str(output), resume=True, quiet=True)
    assert not marker.exists()
    assert read_result(Place(str(output)))["status"] == "failed"
