"""Start clusters of several nodes on this machine and run the doctor on them, in a separate process.

    python -m tests.cluster.doctor_nodes two_nodes|idle_head_v1|idle_head_v2|plain_head|token_head FOLDER

Prints the doctor's results as JSON and stops all processes that it started.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ |= {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
if "token_head" in sys.argv:  # Ray reads this variable on import
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0123456789abcdef" * 4}
for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
    os.environ.pop(name, None)

import ray
from ray._private.services import get_node_ip_address
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID, FAKE_HEAD_NODE_TYPE
from ray.cluster_utils import Cluster

import raycl
from raycl.config.overrides import override
from raycl.doctor.checks import check_access, has_autoscaler
from raycl.doctor.nodes import alive_nodes
from raycl.doctor.result import CheckResult
from raycl.recipes import recipe
from tests.growing_cluster import autoscaler_config, wait_for_head
from tests.ports import free_ports

STORE = 150 * 2**20


def two_nodes(folder: Path) -> list[list[CheckResult]]:
    """A head, and a node with a different working folder, a different raycl, and a fake GPU."""
    here, there, other = folder / "here", folder / "there", folder / "other"
    for each in (here, there):
        each.mkdir()
    shutil.copytree(
        Path(raycl.__file__).parent, other / "raycl", ignore=shutil.ignore_patterns("__pycache__")
    )
    (other / "raycl" / "errors.py").open("a").write("# another version\n")
    os.chdir(here)
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 1,
            "include_dashboard": False,
            "temp_dir": str(folder / "r"),
            "object_store_memory": STORE,
        },
    )
    os.chdir(there)
    os.environ["PYTHONPATH"] = str(other)
    cluster.add_node(num_cpus=1, num_gpus=1, object_store_memory=STORE)
    os.chdir(here)
    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    # /proc/self/cwd resolves to the working folder of each process: a local path that differs between nodes.
    local = raycl.run_doctor(output="/proc/self/cwd/runs/first")
    shared = raycl.run_doctor(output=str(folder / "shared" / "deep" / "run"))
    left = sorted(str(path) for each in (here, there, folder / "shared") for path in each.rglob("*"))
    assert left == [], f"left behind: {left}"
    ray.shutdown()
    cluster.shutdown()
    return [local, shared]


def idle_head_v1(folder: Path) -> list[list[CheckResult]]:
    """A head without CPUs, with an autoscaler v1 that may start nodes."""
    return _examine_head(folder, {"RAY_enable_autoscaler_v2": "0"}, with_autoscaler=True)


def idle_head_v2(folder: Path) -> list[list[CheckResult]]:
    """A head without CPUs, with an autoscaler v2, the default of Ray's launcher."""
    environment = {
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
        "RAY_NODE_TYPE_NAME": FAKE_HEAD_NODE_TYPE,
    }
    return _examine_head(folder, environment, with_autoscaler=True)


def plain_head(folder: Path) -> list[list[CheckResult]]:
    """A head without CPUs and without an autoscaler."""
    return _examine_head(folder, {}, with_autoscaler=False)


def token_head(folder: Path) -> list[list[CheckResult]]:
    """A head that requires a token, which this process has."""
    with _head(folder, {}, with_autoscaler=False) as address:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        found = [check_access(alive_nodes())]
        ray.shutdown()
    return [found]


def _examine_head(
    folder: Path, environment: dict[str, str], *, with_autoscaler: bool
) -> list[list[CheckResult]]:
    with _head(folder, environment, with_autoscaler=with_autoscaler) as address:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
        deadline = time.monotonic() + 60
        while has_autoscaler() is None and time.monotonic() < deadline:
            time.sleep(0.5)  # until the autoscaler's first report
        asked = override(recipe("simclr", image_size=16), {"encoder.name": "resnet10", "encoder.width": 0.25})
        found = raycl.run_doctor(asked, quiet=False)
        ray.shutdown()
    return [found]


@contextlib.contextmanager
def _head(folder: Path, environment: dict[str, str], *, with_autoscaler: bool) -> Iterator[str]:
    [port] = free_ports(1, host="")
    address = f"{get_node_ip_address()}:{port}"
    flags: dict[str, Any] = {
        "port": port,
        "num-cpus": 0,
        "temp-dir": folder / "r",
        "object-store-memory": STORE,
        "include-dashboard": "false",
        "dashboard-agent-listen-port": 0,
    }
    if with_autoscaler:
        flags["autoscaling-config"] = folder / "cluster.json"
        (folder / "cluster.json").write_text(json.dumps(autoscaler_config(address, max_nodes=2)))
    command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block"]
    command += [f"--{name}={value}" for name, value in flags.items()]
    with (folder / "head.log").open("w") as log:
        head = subprocess.Popen(
            command,
            env=os.environ | {"RAY_FAKE_CLUSTER": "1"} | environment,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        wait_for_head(address, folder)
        yield address
    finally:
        head.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            head.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(head.pid, signal.SIGKILL)  # the node leads its own session


if __name__ == "__main__":
    found = globals()[sys.argv[1]](Path(sys.argv[2]))
    print(json.dumps([[vars(finding) for finding in findings] for findings in found]))
