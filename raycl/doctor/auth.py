"""Who may use the cluster: whether Ray refuses those without its token, and who reaches it at all."""

import os
import subprocess
import sys
from collections.abc import Sequence

import ray
from ray._private import worker

from raycl.doctor.machine import reachable_ports
from raycl.doctor.nodes import Node, ask
from raycl.doctor.result import CheckResult

# A process of its own: Ray reads its way of showing tokens once. It asks for a list of names.
_STRANGER = """
import sys
from ray._raylet import GcsClient
GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=10)
"""
_LOOPBACK = ("127.", "localhost", "[::1]")
_PATIENCE_S = 60.0


def examine_access(nodes: Sequence[Node]) -> CheckResult:
    """Ask Ray something without a token; where it answers, look whether other machines reach it."""
    address = ray.get_runtime_context().gcs_address
    refused = refuses_strangers(address)
    if refused is None:
        return CheckResult(
            good=False,
            name="access",
            seen=f"{address} neither answers nor refuses a call without a token",
            remedy="check that the head is well (`ray status`)",
        )
    if refused:
        return CheckResult(good=True, name="access", seen="Ray refuses calls without its token")
    open_doors = _open_doors(address, nodes)
    if not open_doors:
        return CheckResult(
            good=True, name="access", seen="no token is asked for, on this machine's loopback only"
        )
    return CheckResult(
        good=False,
        name="access",
        seen=f"no token is asked for, and other machines reach {' and '.join(open_doors)}: they may run code here",
        remedy="set RAY_AUTH_MODE=token on all nodes before Ray starts (`ray get-auth-token --generate`), and here",
    )


def refuses_strangers(address: str) -> bool | None:
    """Whether Ray refuses a call without a token; None if there is neither an answer nor a refusal."""
    without = {name: value for name, value in os.environ.items() if not name.startswith("RAY_AUTH")}
    try:
        asked = subprocess.run(
            [sys.executable, "-c", _STRANGER, address],
            env=without | {"RAY_AUTH_MODE": "disabled"},
            capture_output=True,
            text=True,
            timeout=_PATIENCE_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None
    if asked.returncode == 0:
        return False
    return True if "InvalidAuthToken" in asked.stderr or "Unauthenticated" in asked.stderr else None


def _open_doors(address: str, nodes: Sequence[Node]) -> list[str]:
    """Return what of Ray's head other machines reach."""
    dashboard = getattr(worker._global_node, "webui_url", None)
    doors = {_port(address): "its head", _port(dashboard): "its dashboard"}
    ports = [port for port in doors if port]
    found = [answer.value for answer in ask([node for node in nodes if node.is_head], reachable_ports, ports)]
    reached = set(found[0] or []) if found else set()
    # An address that is no loopback's is one that other machines use, whatever the head says of it.
    reached |= {_port(each) for each in (address, dashboard) if each and not each.startswith(_LOOPBACK)}
    return [f"{doors[port]} (port {port})" for port in sorted(reached & doors.keys()) if port]


def _port(address: str | None) -> int:
    port = (address or "").rpartition(":")[2]
    return int(port) if port.isdigit() else 0
