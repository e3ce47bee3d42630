"""Starting and joining Ray: the joined cluster, its resources, and the environment of its processes."""

import contextlib
import inspect
import itertools
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from ray._private import utils
from ray._private.node import Node
from ray.exceptions import RaySystemError
from ray.train.v2._internal.constants import ENABLE_PREEMPTION_WATCHER_ENV_VAR

from raycl import ray_runtime
from raycl.config.schema import PoolConfig
from raycl.errors import ConfigError, RunError
from raycl.negatives import bank
from raycl.ray_runtime import (
    _START_TIMEOUT,
    check_resources,
    connect,
    connect_cluster,
    cpus_for_a_worker,
    init_ray,
    prestart_ray,
    require_single,
    wait_for_cpu,
)
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training import banks, coordinator, encoder_pool

JOINED = SimpleNamespace(dashboard_url="")


@pytest.fixture(autouse=True)
def not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a process that has not joined Ray, although other tests in the session have."""
    monkeypatch.setattr(ray_runtime.ray, "is_initialized", lambda: False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)


@pytest.fixture
def fake_init(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], Any]], None]:
    """Replace ``ray.init`` by a function, without access to the home folder and the network."""
    monkeypatch.setattr(ray_runtime, "_keep_token_private", lambda: None)
    monkeypatch.setattr(ray_runtime, "_check_that_it_answers", lambda _: None)

    def replace(init: Callable[[], Any]) -> None:
        monkeypatch.setattr(ray_runtime.ray, "init", lambda **_: init())

    return replace


def test_a_cluster_without_cpus_is_refused_unless_one_comes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Any] = []
    comes = iter([False, True])
    monkeypatch.setattr(ray_runtime.ray, "cluster_resources", dict)
    monkeypatch.setattr(ray_runtime, "remove_placement_group", asked.append)

    def request(bundles: Any) -> Any:
        asked.append(bundles)
        return SimpleNamespace(wait=lambda _: next(comes))

    monkeypatch.setattr(ray_runtime, "placement_group", request)
    with pytest.raises(ConfigError, match="the cluster has no CPU, and none came in 15 minutes; check its"):
        wait_for_cpu()
    wait_for_cpu()
    assert asked[0] == [{"CPU": 1}] and len(asked) == 4  # each request is removed
    assert capsys.readouterr().err == "the cluster has no CPU yet; waiting up to 15 minutes for one\n" * 2
    monkeypatch.setattr(ray_runtime.ray, "cluster_resources", lambda: {"CPU": 1.0})
    wait_for_cpu()
    assert len(asked) == 4


@pytest.mark.parametrize(
    ("address", "is_used"),
    [("127.0.0.1:1", True), ("localhost:1", True), ("127.0.0.1:2", False), ("10.0.0.1:1", False)],
)
def test_the_ray_of_another_command_on_this_machine_is_joined_with_the_users_token(
    address: str, is_used: bool, fake_init: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[str]()
    monkeypatch.setattr(ray_runtime, "_running_here", lambda: frozenset({"127.0.0.1:1", "10.0.0.1:1"}))
    monkeypatch.setattr(
        ray_runtime.tokens, "maybe_enable_token_auth_if_token_available", lambda **_: calls.append("token")
    )

    def init() -> Any:
        calls.append("init")
        return JOINED

    fake_init(init)
    connect_cluster(address)
    assert calls == ["token", "init"][not is_used :]


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        (set(), "no Ray runs on this machine.*--address"),
        ({"10.0.0.1:2", "10.0.0.1:1"}, "2 Rays run.*10.0.0.1:1, 10.0.0.1:2.*--address"),
    ],
)
def test_a_single_ray_cluster_is_joined_and_zero_or_several_are_refused(
    addresses: set[str], says: str
) -> None:
    assert require_single({"10.0.0.1:6379"}) == "10.0.0.1:6379"
    with pytest.raises(ConfigError, match=says):
        require_single(addresses)


def test_a_bank_is_found_among_several_ray_clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    banks = {"10.0.0.1:1": ["moco", "both"], "10.0.0.1:2": ["other", "both"], "10.0.0.1:3": None}
    joined, left = list[str](), list[str]()

    def list_banks(address: str) -> list[str]:
        joined.append(address)
        if (names := banks[address]) is None:
            raise RunError("cannot join a Ray cluster")
        return names

    spec = SimpleNamespace(output="runs/x")
    monkeypatch.setattr(ray_runtime, "_running_here", lambda: frozenset(banks))
    monkeypatch.setattr(bank, "list_banks", list_banks)
    monkeypatch.setattr(bank, "connect_bank", lambda name: SimpleNamespace(spec=spec))
    monkeypatch.setattr(ray_runtime.ray, "shutdown", lambda: left.append(joined[-1]))
    assert bank.ray_of_bank("moco") == "10.0.0.1:1"
    assert bank.ray_of_bank("other") == "10.0.0.1:2"
    assert joined == left == [*banks, *banks]
    with pytest.raises(
        ConfigError, match=r"2 Rays .*'both': 10.0.0.1:1 \(runs/x\), 10.0.0.1:2 .*--address HOST:PORT"
    ):
        bank.ray_of_bank("both")
    with pytest.raises(ConfigError, match="none of the 3 Rays .*1: moco, both; .*3: no answer .cannot join"):
        bank.ray_of_bank("none")
    assert bank.ray_of_bank("moco", "10.0.0.1:9") == "10.0.0.1:9"
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:8")
    assert bank.ray_of_bank("moco") is None
    monkeypatch.delenv("RAY_ADDRESS")
    del banks["10.0.0.1:2"], banks["10.0.0.1:3"]
    assert bank.ray_of_bank("moco") is None  # the only Ray


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:many"])
def test_an_invalid_address_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        connect(address)


@pytest.mark.parametrize("join", [connect, init_ray])
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "localhost:1"])
def test_a_stopped_ray_cluster_is_reported_at_once(address: str, join: Callable[[str], object]) -> None:
    with pytest.raises(RunError, match="nothing answers"):
        join(address)


@pytest.mark.parametrize("module", ["raycl.negatives.bank", "raycl.cli.bank", "raycl.cli.main"])
def test_a_query_imports_neither_torch_nor_ray_train(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'ray.data', 'ray.train', 'pandas'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("address", "variable", "starts"),
    [
        (None, None, True),
        ("local", "10.0.0.1:6379", True),
        ("10.0.0.1:6379", None, False),
        (None, "10.0.0.1:6379", False),
    ],
)
def test_only_a_local_ray_is_started_early(
    monkeypatch: pytest.MonkeyPatch, address: str | None, variable: str | None, starts: bool
) -> None:
    entered, imported = threading.Event(), []

    def import_module(name: str) -> None:
        assert entered.wait(10), "torch is not imported while Ray starts"
        imported.append(name)

    def init(where: str, *, debug: bool) -> None:
        # Ray's processes stop when the thread that started them ends.
        assert (where, threading.current_thread()) == ("local", threading.main_thread())
        entered.set()

    monkeypatch.setattr(ray_runtime, "import_module", import_module)
    monkeypatch.setattr(ray_runtime, "init_ray", init)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    prestart_ray(address)
    assert (imported, entered.is_set()) == (["raycl.models.vision"] if starts else [], starts)


def test_a_failed_import_is_raised_when_ray_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def import_module(name: str) -> None:
        raise ImportError(f"no {name} here")

    monkeypatch.setattr(ray_runtime, "import_module", import_module)
    monkeypatch.setattr(ray_runtime, "init_ray", lambda *_, **__: None)
    with pytest.raises(ImportError, match="no raycl.models.vision here"):
        prestart_ray(None)


@pytest.mark.parametrize("given", [None, "1"])
def test_a_local_ray_starts_without_a_preemption_watcher(
    monkeypatch: pytest.MonkeyPatch, fake_init: Any, given: str | None
) -> None:
    monkeypatch.delenv(ENABLE_PREEMPTION_WATCHER_ENV_VAR, raising=False)  # set by the tests themselves
    if given is not None:
        monkeypatch.setenv(ENABLE_PREEMPTION_WATCHER_ENV_VAR, given)
    seen = []
    fake_init(lambda: seen.append(os.environ.get(ENABLE_PREEMPTION_WATCHER_ENV_VAR)) or JOINED)
    init_ray("local")
    init_ray("10.0.0.1:6379")
    assert seen == [given or "0", given]
    assert os.environ.get(ENABLE_PREEMPTION_WATCHER_ENV_VAR) == given


def test_a_ray_is_raycls_own_only_if_this_process_started_it_last(
    monkeypatch: pytest.MonkeyPatch, fake_init: Any
) -> None:
    def start() -> SimpleNamespace:
        monkeypatch.setattr(ray_runtime.worker, "_global_node", SimpleNamespace())
        return JOINED

    assert not ray_runtime.is_own_ray()
    fake_init(start)
    monkeypatch.setattr(ray_runtime, "_own_node", None)
    init_ray("local")
    monkeypatch.setattr(ray_runtime.ray, "is_initialized", lambda: True)
    assert ray_runtime.is_own_ray()
    start()  # as a user does
    assert not ray_runtime.is_own_ray()
    init_ray("10.0.0.1:6379")
    assert not ray_runtime.is_own_ray()


def test_the_processes_of_a_local_ray_look_for_each_other_often(
    monkeypatch: pytest.MonkeyPatch, fake_init: Any
) -> None:
    names = [f"RAY_raylet_client_{name}" for name in ("connect_timeout_milliseconds", "num_connect_attempts")]
    for name in names:
        monkeypatch.delenv(name, raising=False)
    seen: list[list[str]] = []
    fake_init(lambda: seen.append([os.environ.get(name, "") for name in names]) or JOINED)
    init_ray("local")
    init_ray("10.0.0.1:6379")
    assert seen == [["50", "200"], ["", ""]]


@pytest.mark.parametrize(("debug", "logs"), [(False, False), (True, True)])
def test_a_local_ray_starts_without_processes_that_serve_nobody(
    monkeypatch: pytest.MonkeyPatch, fake_init: Any, debug: bool, logs: bool
) -> None:
    started = list[str]()
    helpers = ("start_api_server", "start_monitor", "start_log_monitor")
    for name in helpers:
        monkeypatch.setattr(Node, name, lambda _, name=name, **__: started.append(name))
    put = list[tuple[Any, ...]]()
    node: Any = Node.__new__(Node)
    monkeypatch.setattr(
        Node, "get_gcs_client", lambda _: SimpleNamespace(internal_kv_put=lambda *given: put.append(given))
    )

    def init() -> object:
        node.start_monitor()
        node.start_api_server(include_dashboard=False, raise_on_failure=False)
        node.start_log_monitor()
        return JOINED

    fake_init(init)
    init_ray("local", debug=debug)
    assert started == ["start_log_monitor"] * logs
    assert put == [(b"dashboard", b"127.0.0.1:0", True, b"dashboard")]  # for Ray's agent, which waits for it
    started.clear()
    init_ray("10.0.0.1:6379", debug=debug)
    assert started == ["start_monitor", "start_api_server", "start_log_monitor"]


@pytest.fixture
def restored_sigterm() -> Iterator[None]:
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


@pytest.mark.parametrize("own", [signal.SIG_DFL, signal.default_int_handler])
@pytest.mark.usefixtures("restored_sigterm")
def test_ray_handles_sigterm_only_in_a_process_without_a_handler(fake_init: Any, own: Any) -> None:
    seen: list[Any] = []

    def handler_of_ray(*_: object) -> None:
        sys.exit(15)

    def init() -> object:
        utils.set_sigterm_handler(handler_of_ray)
        seen.append(signal.getsignal(signal.SIGTERM))
        return JOINED

    fake_init(init)
    signal.signal(signal.SIGTERM, own)
    init_ray("local")
    seen.append(signal.getsignal(signal.SIGTERM))
    assert seen == [own if callable(own) else handler_of_ray] * 2


class SlowNode(Node):
    """Times out while starting, as in Ray 2.60, before Ray stores a reference to it."""

    num_killed = 0

    def __init__(self) -> None:
        raise Exception(
            "The current node timed out during startup. This could happen because some of the raylet failed to "
            "startup or the GCS has become overloaded."
        )

    def kill_all_processes(
        self, check_alive: bool = True, allow_graceful: bool = False, wait: bool = False
    ) -> None:
        SlowNode.num_killed += 1


@pytest.mark.parametrize("failures", [1, 2])
def test_a_timeout_while_starting_ray_is_retried_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fake_init: Any, failures: int
) -> None:
    shut: list[int] = []
    monkeypatch.setattr(ray_runtime.ray, "shutdown", lambda: shut.append(SlowNode.num_killed))
    monkeypatch.setattr(SlowNode, "num_killed", 0)
    fake_init(lambda: SlowNode() if len(shut) < failures else JOINED)
    if failures == 1:
        assert init_ray("local") is None
    else:
        with pytest.raises(RunError, match="twice: this machine is too busy.*--address HOST:PORT"):
            init_ray("local")
    assert shut == [1, 2][:failures]
    assert capsys.readouterr().err.count("retrying once") == 1
    assert _START_TIMEOUT in inspect.getsource(Node)


def test_other_failures_to_start_ray_are_not_retried(
    capsys: pytest.CaptureFixture[str], fake_init: Any
) -> None:
    def init() -> object:
        raise Exception("no such file")

    fake_init(init)
    with pytest.raises(Exception, match="no such file"):
        init_ray("local")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("debug", "given", "level"), [(False, None, "fatal"), (False, "info", "info"), (True, None, None)]
)
def test_rays_core_is_silenced_only_in_this_process_and_not_while_debugging(
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    fake_init: Any,
    debug: bool,
    given: str | None,
    level: str | None,
) -> None:
    monkeypatch.delenv("RAY_BACKEND_LOG_LEVEL", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_BACKEND_LOG_LEVEL", given)
    levels = []

    def connect() -> None:
        levels.append(os.environ.get("RAY_BACKEND_LOG_LEVEL"))
        os.write(2, b"logging.cc:303: Set ray log level\n")

    def init() -> object:
        levels.append(os.environ.get("RAY_BACKEND_LOG_LEVEL"))
        ray_runtime.worker.connect()
        os.write(2, b"other output\n")
        return JOINED

    monkeypatch.setattr(ray_runtime.worker, "connect", connect)
    fake_init(init)
    init_ray("10.0.0.1:6379", debug=debug, quiet_core=True)
    assert levels == [given, level]
    assert os.environ.get("RAY_BACKEND_LOG_LEVEL") == given
    assert ray_runtime.worker.connect is connect
    lines = capfd.readouterr().err.splitlines()
    assert ("logging.cc:303: Set ray log level" in lines) is debug
    assert lines[-1] == "other output"


@pytest.mark.parametrize(
    ("num_cpus", "spare_cpus", "remedies", "says"),
    [
        (0, 0, [], "the cluster has 0; add a node with CPUs, or set autoscaling=true if"),
        (0, 1, ["set data.cache=materialize"], "the cluster has 0; add a node with CPUs, or set"),
        (1, 0, [], "the cluster has 1; lower --workers, set cpus_per_worker, or set autoscaling=true if"),
        (1, 1, ["set data.cache=materialize"], "the cluster has 1; set data.cache=materialize, or set"),
    ],
)
def test_the_remedies_for_too_few_cpus_have_an_effect(
    num_cpus: int, spare_cpus: int, remedies: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ray_runtime.ray, "cluster_resources", lambda: {"CPU": float(num_cpus)} if num_cpus else {}
    )
    with pytest.raises(ConfigError, match=says):
        check_resources(workers=2, cpus_per_worker=1, gpu=False, spare_cpus=spare_cpus, remedies=remedies)


def test_workers_that_share_cpus_cause_a_one_line_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    warnings = []
    for workers, cpus in ((2, 2.0), (8, 2.0), (2, 1.0)):
        monkeypatch.setattr(ray_runtime.ray, "cluster_resources", lambda cpus=cpus: {"CPU": cpus})
        warnings.append(ray_runtime.crowding(workers))
    advice = "which makes each of them slower; lower --workers to {}, or join a larger cluster by --address"
    assert warnings == [
        None,
        f"8 workers share 2 CPUs, {advice.format(2)}",
        f"2 workers share 1 CPU, {advice.format(1)}",
    ]


@pytest.mark.parametrize("spare_cpus", [0.0, 1.0, 1.3])
def test_the_cpus_of_all_workers_fit_and_are_counted_exactly(
    spare_cpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for have, workers in itertools.product(range(1, 65), range(1, 65)):
        monkeypatch.setattr("ray.cluster_resources", lambda have=have: {"CPU": float(have)})
        cpus = cpus_for_a_worker(workers=workers, spare_cpus=spare_cpus)
        if 16 * (have - spare_cpus) < workers:  # the check of resources refuses them
            assert workers * cpus + spare_cpus > have
            continue
        assert workers * cpus + spare_cpus <= have
        assert sum([cpus] * workers) // cpus == workers  # as Ray Train counts what is reserved
        assert cpus == 1.0 or (workers * (cpus + 1 / 16) + spare_cpus) > have


@pytest.mark.parametrize("owner", ["coordinator", "bank", "pool"])
def test_the_end_of_ray_does_not_hide_the_error_that_it_caused(
    owner: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kill(actor: object) -> None:
        raise RaySystemError("Ray has not been started yet")

    actor, spec = MagicMock(), SimpleNamespace(name="run", detached=False)
    monkeypatch.setattr("ray.kill", kill)
    monkeypatch.setattr("ray.put", lambda value: value)
    for module in (coordinator, encoder_pool):
        monkeypatch.setattr(module, "helper_actor", lambda kind, **_: actor)
    monkeypatch.setattr(banks, "bank_spec", lambda *_, **__: spec)
    monkeypatch.setattr(banks, "start_bank", lambda *_, **__: bank.Bank(spec, [actor, actor]))  # pyright: ignore
    monkeypatch.setattr(banks, "ray", MagicMock())
    job: Any = MagicMock(config=recipe("moco_v2"), output=Place("run"))
    opened: dict[str, contextlib.AbstractContextManager[Any]] = {
        "coordinator": coordinator.start_coordinator(),
        "bank": banks.open_bank(job, print),
        "pool": encoder_pool.start_pool(MagicMock(), PoolConfig(), print, actors=(1, 1)),
    }
    with pytest.raises(RunError, match="the cause"), opened[owner]:
        raise RunError("the cause")
