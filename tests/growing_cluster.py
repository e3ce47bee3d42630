"""A Ray cluster on this machine that adds nodes on demand and removes idle ones.

Ray's fake node provider replaces a cloud: each node is a raylet with one CPU, started and stopped by
Ray's autoscaler. Only the boot time of a machine and GPUs are simulated.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from ray._private.services import get_node_ip_address
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]
from ray.autoscaler._private.fake_multi_node import node_provider
from ray.core.generated.gcs_pb2 import GcsNodeInfo  # pyright: ignore[reportAttributeAccessIssue]

from tests.ports import free_ports

ROOT = Path(__file__).parent.parent
IDLE_S = 10.0
STORE_BYTES = 150 * 2**20

MARK = "RAYCL_GROWING_CLUSTER"  # set to the cluster's folder in the environment of all its processes


@final
class SlowProvider(node_provider.FakeMultiNodeProvider):
    """Start nodes one at a time, each after ``boot_s`` seconds, like a cloud with little capacity."""

    def create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        for _ in range(count):
            time.sleep(self.provider_config["boot_s"])
            super().create_node_with_resources_and_labels(node_config, tags, 1, resources, labels)


@final
@dataclass(frozen=True)
class Seen:
    """The live nodes without the head, and their CPUs, at a Unix time."""

    time: float
    nodes: int
    cpus: int


@final
class GrowingCluster:
    """The head's address and the cluster's folder; ``seen`` holds all observations so far."""

    def __init__(self, address: str, folder: Path) -> None:
        self.address, self.folder = address, folder
        self.environment = os.environ | {
            "RAY_ADDRESS": address,
            "RAY_AUTH_MODE": "disabled",
            MARK: str(folder),
        }
        self.seen: list[Seen] = []
        self._gcs: Any = GcsClient(address=address)

    def look(self) -> Seen:
        """Query Ray for its nodes and record the result."""
        known = self._gcs.get_all_node_info(timeout=20).values()
        alive = [node for node in known if node.state == GcsNodeInfo.ALIVE and not node.is_head_node]
        cpus = sum(node.resources_total.get("CPU", 0.0) for node in alive)
        self.seen.append(Seen(time.time(), len(alive), round(cpus)))
        return self.seen[-1]

    def train(
        self, *arguments: str, meanwhile: Callable[[], None] = lambda: None, timeout_s: float = 1_500.0
    ) -> tuple[float, float]:
        """Run ``raycl train`` as a user would, by ``run``."""
        command = [str(Path(sys.executable).with_name("raycl")), "train", *arguments]
        return self.run(command, meanwhile=meanwhile, timeout_s=timeout_s)

    def run(
        self, command: list[str], *, meanwhile: Callable[[], None] = lambda: None, timeout_s: float = 1_500.0
    ) -> tuple[float, float]:
        """Run a command on the cluster; return its start and end times.

        Records the nodes and calls the ``meanwhile`` callback once a second. Raises ``RuntimeError`` with the
        end of the output if the command fails or takes too long.
        """
        log = self.folder / "command.log"
        began = time.time()
        with log.open("w") as file:
            running = subprocess.Popen(
                command, cwd=ROOT, env=self.environment, stdout=file, stderr=file, start_new_session=True
            )
        try:
            while running.poll() is None and time.time() < began + timeout_s:
                self.look()
                meanwhile()
                time.sleep(1.0)
        finally:
            if running.poll() is None:
                running.kill()
                running.wait()
        if running.returncode:
            raise RuntimeError(f"{command[:2]} ended with {running.returncode}:\n{log.read_text()[-3_000:]}")
        return began, time.time()

    def output(self) -> str:
        """Return the output of the last command."""
        return (self.folder / "command.log").read_text()

    def wait_until_empty(self, *, timeout_s: float = 120.0) -> Seen:
        """Query the nodes once a second until all are gone or the timeout ends; return the last observation."""
        deadline = time.monotonic() + timeout_s
        while (seen := self.look()).nodes and time.monotonic() < deadline:
            time.sleep(1.0)
        return seen


@contextmanager
def growing_cluster(*, max_nodes: int, boot_s: float = 0.0, gpus: int = 0) -> Iterator[GrowingCluster]:
    """Start a head without CPUs and a limit of nodes, each with ``gpus``; stop all its processes afterwards."""
    # The path of a socket is limited to 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="rcl", dir="/tmp"))
    try:
        head, address = _start_head(folder, max_nodes, boot_s, gpus)
        try:
            wait_for_head(address, folder)
            yield GrowingCluster(address, folder)
        finally:
            head.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                head.wait(20)
            end_processes(folder)
            head.wait()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def processes_of(folder: Path) -> set[int]:
    """Return all processes that inherited the marker of this cluster's folder."""
    mark = f"{MARK}={folder}\0".encode()
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark in (process / "environ").read_bytes():
                found.add(int(process.name))
    return found


def _start_head(
    folder: Path, max_nodes: int, boot_s: float, gpus: int
) -> tuple[subprocess.Popen[bytes], str]:
    (port, agent), head_id = free_ports(2, host=""), node_provider.FAKE_HEAD_NODE_ID
    address = f"{get_node_ip_address()}:{port}"
    config = folder / "cluster.json"
    config.write_text(json.dumps(autoscaler_config(address, max_nodes, boot_s, gpus)))
    environment = os.environ | {
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_AUTH_MODE": "disabled",
        "RAY_CLOUD_INSTANCE_ID": head_id,
        "RAY_FAKE_CLUSTER": "1",
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": head_id,
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_enable_autoscaler_v2": "1",
        MARK: str(folder),
    }
    flags = {
        "port": port,
        "num-cpus": 0,
        "temp-dir": folder / "ray",
        "autoscaling-config": config,
        "object-store-memory": STORE_BYTES,
        "include-dashboard": "false",
        "dashboard-agent-listen-port": agent,
    }
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    return head, address


def autoscaler_config(address: str, max_nodes: int, boot_s: float = 0.0, gpus: int = 0) -> dict[str, Any]:
    """Return the autoscaler's configuration; it requires even empty sections."""
    # The provider recognizes the head by this type only.
    head_type = node_provider.FAKE_HEAD_NODE_TYPE
    resources = {"CPU": 1, "GPU": gpus, "object_store_memory": STORE_BYTES}
    lists = ["initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray"]
    return {
        "cluster_name": "raycl-growing",
        "max_workers": max_nodes,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": IDLE_S / 60,
        "provider": {
            "type": "external",
            "module": f"{SlowProvider.__module__}.{SlowProvider.__name__}",
            "gcs_address": address,
            "head_node_id": node_provider.FAKE_HEAD_NODE_ID,
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "foreground_node_launch": True,
            "boot_s": boot_s,
        },
        "head_node_type": head_type,
        "available_node_types": {
            head_type: {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "worker": {"resources": resources, "node_config": {}, "min_workers": 0, "max_workers": max_nodes},
        },
        **{name: {} for name in ("auth", "docker", "file_mounts")},
        **{name: [] for name in ("cluster_synced_files", "rsync_exclude", "rsync_filter")},
        **{f"{name}_commands": [] for name in lists},
        "file_mounts_sync_continuously": False,
    }


def wait_for_head(address: str, folder: Path) -> None:
    host, port = address.split(":")
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError):
            socket.create_connection((host, int(port)), 1).close()
            return
        time.sleep(0.2)
    raise TimeoutError(
        f"the head did not come up in two minutes:\n{(folder / 'head.log').read_text()[-2_000:]}"
    )


def end_processes(folder: Path) -> None:
    """Kill the remaining processes; the provider does not stop running nodes."""
    deadline = time.monotonic() + 30
    while left := processes_of(folder):
        if time.monotonic() > deadline:
            raise TimeoutError(f"processes {sorted(left)} of {folder} could not be ended")
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.2)
