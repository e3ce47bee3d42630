"""A worker's process: exact and fast matrix products, and the process that could replace it."""

import gc
import time
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from ray.train import ScalingConfig
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.recipes import recipe
from raycl.training import controller, process, standby
from raycl.training.controller import RayTrainer
from raycl.training.coordinator import RunCoordinator
from raycl.training.process import environment, multiply_by_onednn, prepare_device, prepare_process
from raycl.training.standby import (
    HOOK,
    import_worker,
    importing,
    nodes_with_room,
    request_standby,
    stand_by,
    stand_by_elsewhere,
)

pytestmark = pytest.mark.usefixtures("process_settings")

PRODUCTS = torch.backends.mkldnn.matmul


def relative_error(ours: torch.Tensor, exact: torch.Tensor) -> float:
    return float((ours.double() - exact).norm() / exact.norm())


@pytest.mark.parametrize("size", [1, 7, 100, 1_000])
def test_a_prepared_process_multiplies_and_differentiates_in_full_float32(size: int) -> None:
    prepare_process(1)
    torch.manual_seed(0)
    layer, rows = torch.nn.Linear(96, size), torch.randn(300, 96, requires_grad=True)
    layer(rows).square().sum().backward()
    weight, bias = layer.weight.detach().double(), layer.bias.detach().double()
    exact = rows.detach().double() @ weight.T + bias
    assert relative_error(layer(rows).detach(), exact) < 1e-6
    assert rows.grad is not None
    assert relative_error(rows.grad, 2 * exact @ weight) < 1e-6
    assert layer.weight.grad is not None
    assert relative_error(layer.weight.grad, 2 * exact.T @ rows.detach().double()) < 1e-6


def test_exact_products_use_onednn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_product_error", lambda shape: 3e-7)
    PRODUCTS.fp32_precision = "ieee"
    assert multiply_by_onednn()
    assert PRODUCTS.fp32_precision == "bf16"


def test_products_that_onednn_would_round_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    # As on a processor with bfloat16 matrix units.
    rounded = process._product_error
    monkeypatch.setattr(process, "_product_error", lambda shape: 3e-3 if len(shape) > 2 else rounded(shape))
    PRODUCTS.fp32_precision = "ieee"
    assert not multiply_by_onednn()
    assert PRODUCTS.fp32_precision == "ieee"


def test_the_error_of_a_product_distinguishes_bfloat16_from_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(process._product_error(shape) < process._EXACT / 10 for shape in process._TRIED)
    multiply = torch.Tensor.__matmul__

    def rounded(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if left.dtype == torch.float64:
            return multiply(left, right)
        return multiply(left.bfloat16(), right.bfloat16()).float()

    monkeypatch.setattr(torch.Tensor, "__matmul__", rounded)
    assert all(process._product_error(shape) > 10 * process._EXACT for shape in process._TRIED)


@pytest.mark.parametrize("is_amd", [True, False])
def test_mkl_is_replaced_only_on_processors_where_it_is_slow(
    is_amd: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(process, "_is_amd", lambda: is_amd)
    monkeypatch.setattr(process, "multiply_by_onednn", lambda: asked.append(True))
    prepare_process(1)
    assert asked == [True] * is_amd


CUDA = torch.device("cuda", 0)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    cudnn = torch.backends.cudnn
    before = cudnn.benchmark, cudnn.allow_tf32
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: including_emulation)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda device: "Tesla T4")
    yield monkeypatch
    cudnn.benchmark, cudnn.allow_tf32 = before


def test_a_gpu_benchmarks_its_kernels_and_rounds_convolutions_unless_float32_is_set(
    card: pytest.MonkeyPatch,
) -> None:
    card.setattr("torch.cuda.is_bf16_supported", lambda including_emulation=True: True)
    for precision, is_rounded in (("auto", True), ("bfloat16", True), ("float32", False)):
        config = override(recipe("simclr"), {"gpu": True, "precision": precision})
        assert prepare_device(config, CUDA) == config
        assert torch.backends.cudnn.benchmark
        assert torch.backends.cudnn.allow_tf32 == is_rounded
        assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.usefixtures("card")
def test_a_gpu_without_bfloat16_computes_in_float32_or_is_refused() -> None:
    asked = override(recipe("simclr"), {"gpu": True})
    assert prepare_device(asked, CUDA).tower_precision == "float32"
    assert prepare_device(override(asked, {"precision": "float32"}), CUDA).tower_precision == "float32"
    with pytest.raises(ConfigError, match="precision=bfloat16 needs GPUs that have it, got Tesla T4; set"):
        prepare_device(override(asked, {"precision": "bfloat16"}), CUDA)


def test_the_settings_of_a_cpu_stay_unchanged(card: pytest.MonkeyPatch) -> None:
    card.setattr(torch.backends.cudnn, "benchmark", False)
    config = override(recipe("simclr"), {"precision": "bfloat16"})
    assert prepare_device(config, torch.device("cpu")) == config
    assert not torch.backends.cudnn.benchmark


def test_the_users_own_gpu_allocator_setting_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTORCH_ALLOC_CONF", raising=False)
    assert "PYTORCH_ALLOC_CONF" not in environment(gpu=False)
    assert environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64")
    assert environment(gpu=True)["PYTORCH_ALLOC_CONF"] == "max_split_size_mb:64"


def test_a_new_process_imports_modules_unless_it_lacks_raycl_or_has_a_hook_of_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    context = SimpleNamespace(runtime_env={"env_vars": {"OTHER": "1"}})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    assert importing("import_worker") == {HOOK: "raycl.training.standby.import_worker"}
    context.runtime_env = {}
    assert importing("import_controller") == {HOOK: "raycl.training.standby.import_controller"}
    context.runtime_env = {"env_vars": {HOOK: "theirs.hook"}}
    assert importing("import_worker") == {}

    def missing(name: str) -> None:
        raise PackageNotFoundError(name)

    context.runtime_env = {}
    monkeypatch.setattr("importlib.metadata.distribution", missing)
    assert importing("import_worker") == {}


def test_a_new_worker_collects_no_garbage_while_it_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[tuple[str, bool]] = []

    def importing_module(name: str) -> None:
        imported.append((name, gc.isenabled()))
        raise ImportError(name)  # which the actor reports

    monkeypatch.setattr("importlib.import_module", importing_module)
    import_worker()
    assert imported == [("raycl.training.loop", False)]
    assert gc.isenabled()


def test_only_on_a_ray_of_its_own_a_driver_asks_once_for_early_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(controller, "request_standby", lambda number, **_: asked.append(number))
    monkeypatch.setattr(controller, "controller_environment", dict)
    controller._prestart.cache_clear()
    for is_own, job, count in ((False, "1", 0), (True, "1", 1), (True, "1", 1), (True, "2", 2)):
        context = SimpleNamespace(get_job_id=lambda job=job: job)
        monkeypatch.setattr("ray.get_runtime_context", lambda context=context: context)
        monkeypatch.setattr(controller, "is_own_ray", lambda is_own=is_own: is_own)
        controller.prestart_controller()
        assert asked == [2] * count


@pytest.mark.parametrize("name", ["import_worker", "import_controller", "import_reader"])
def test_a_new_process_imports_a_module_that_exists(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    imported: list[str] = []
    monkeypatch.setattr("importlib.import_module", imported.append)
    getattr(standby, name)()
    [module] = imported
    assert find_spec(module) is not None


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ("{}", '{"env_vars": {"A": "1", "Z": "2"}}'),
        ('{"env_vars": {"A": "0", "B": "3"}}', '{"env_vars":{"A":"1","B":"3","Z":"2"}}'),
        ('{"env_vars":{"A":"0","B":"3"}}', '{"env_vars":{"A":"1","B":"3","Z":"2"}}'),
    ],
)
def test_the_environment_of_an_actor_is_written_as_by_ray(
    own: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = SimpleNamespace(get_runtime_env_string=lambda: own)
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    assert standby._environment({"Z": "2", "A": "1"}) == expected
    assert standby._environment({}) == own


def test_a_process_without_ray_asks_for_no_other_and_starts_no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[object] = []
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setattr("ray._private.auto_init_hook.auto_init_ray", lambda: started.append(1))
    assert not request_standby()
    assert started == []


@pytest.mark.parametrize(("age_s", "delay_s"), [(0, 60), (30, 30), (50, 15), (9_999, 15)])
def test_processes_are_asked_for_a_minute_after_the_start_of_the_run_or_soon_after_a_loss(
    age_s: float, delay_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[float, list[int], dict[str, Any]]] = []

    class Timer:
        daemon = False

        def __init__(
            self, delay: float, function: object, numbers: list[int], options: dict[str, Any]
        ) -> None:
            assert function is request_standby
            asked.append((delay, numbers, options))

        def start(self) -> None:
            assert self.daemon  # or the process would wait for it

    monkeypatch.setattr("threading.Timer", Timer)
    stand_by(3, began=time.time() - age_s)
    stand_by(began=time.time() - age_s, turn=2, env_vars={"OTHER": "1"})
    assert asked == [
        (pytest.approx(delay_s, abs=1), [3], {"env_vars": None}),
        (pytest.approx(delay_s + 4, abs=1), [1], {"env_vars": {"OTHER": "1"}}),
    ]


def node(name: str, *, is_alive: bool = True, **resources: float) -> dict[str, Any]:
    """A node as ``ray.nodes`` lists it."""
    return {
        "NodeID": name,
        "Alive": is_alive,
        "NodeManagerAddress": "10.0.0.1",
        "NodeManagerPort": 1,
        "Resources": resources,
    }


def test_living_nodes_with_all_resources_of_a_worker_have_room() -> None:
    nodes = [
        node("large", CPU=8.0, GPU=1.0),
        node("equal", CPU=2.0, GPU=1.0),
        node("small", CPU=1.0, GPU=1.0),
        node("no_gpu", CPU=8.0),
        node("dead", is_alive=False, CPU=8.0, GPU=1.0),
    ]
    assert nodes_with_room(nodes, {"CPU": 2.0, "GPU": 1.0}) == dict.fromkeys(["large", "equal"], "10.0.0.1:1")


def test_nodes_get_processes_once_and_no_more_than_allowed_while_dead_ones_do_not_count() -> None:
    coordinator = RunCoordinator()
    coordinator.add_standby_node("own")
    assert coordinator.nodes_without_standby(["a", "own", "b", "c"], most=3) == ["a", "b"]
    coordinator.add_standby_node("a")
    coordinator.add_standby_node("b")
    assert coordinator.nodes_without_standby(["a", "own", "b", "c"], most=3) == []
    assert coordinator.nodes_without_standby(["own", "b", "c", "d"], most=3) == ["c"]  # "a" is gone


@pytest.mark.parametrize("refused", [[], ["a:1"], ["b:1"]])
def test_the_first_worker_asks_each_other_node_until_it_agrees_as_nodes_join(
    refused: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = RunCoordinator()
    coordinator.add_standby_node("own")
    asked: list[str] = []
    of_readers: list[str] = []
    reader = {"OTHER": "1"}
    every = ["own", "a", "b", "c", "d"]
    looks = iter([["own", "a"], ["own", "a"], every, every])

    def request(*, address: str, env_vars: dict[str, str] | None = None) -> bool:
        if env_vars is not None:
            of_readers.append(address)
            return env_vars == reader
        asked.append(address)
        return asked.count(address) > refused.count(address)

    class Thread:
        def __init__(self, target: Callable[[], None], *, name: str, daemon: bool) -> None:
            assert daemon  # or the process would wait for it
            self.start = target

    def sleep(seconds: float, slept: list[float] = []) -> None:  # noqa: B006
        slept += [seconds] if seconds != standby._TURN_S else []
        if len(slept) == 5:
            raise EndOfTest

    def nodes() -> list[dict[str, Any]]:
        return [node(name, CPU=2.0) | {"NodeManagerAddress": name} for name in next(looks)]

    actor = SimpleNamespace(
        nodes_without_standby=SimpleNamespace(remote=coordinator.nodes_without_standby),
        add_standby_node=SimpleNamespace(remote=coordinator.add_standby_node),
    )
    monkeypatch.setattr("threading.Thread", Thread)
    monkeypatch.setattr("raycl.training.standby.time.sleep", sleep)
    monkeypatch.setattr("ray.nodes", nodes)
    monkeypatch.setattr("ray.get", lambda value, timeout: value)
    context = SimpleNamespace(get_assigned_resources=lambda: {"CPU": 2.0})
    monkeypatch.setattr("ray.get_runtime_context", lambda: context)
    monkeypatch.setattr("raycl.training.standby.request_standby", request)
    monkeypatch.setattr("random.Random.sample", lambda self, population, k: sorted(population))
    with pytest.raises(EndOfTest):
        stand_by_elsewhere(actor, workers=2, began=0.0, actors=[reader])
    # Four nodes in all for two workers; a node that refused is asked again.
    assert sorted(asked) == sorted(of_readers) == sorted(["a:1", "b:1", "c:1", *refused])


class EndOfTest(BaseException):
    """Ends an endless thread."""


@pytest.mark.parametrize("requests", [True, False])
def test_a_trainer_without_requests_starts_no_actor_that_collects_them(
    requests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    called = SimpleNamespace(run=MagicMock(), get_result=MagicMock())
    actor = SimpleNamespace(remote=lambda **arguments: given.update(arguments) or called)
    monkeypatch.setattr(controller, "helper_actor", lambda *_, **__: actor)
    monkeypatch.setattr(controller, "controller_environment", dict)
    monkeypatch.setattr(controller.ray, "get", lambda _: None)
    scaling = ScalingConfig(num_workers=2)
    trainer = RayTrainer(print, began=0.0, scaling_config=scaling, requests_resources=requests)
    trainer._initialize_and_run_controller(scaling_policy=FixedScalingPolicy(scaling))
    policy, client = given["scaling_policy"], MagicMock()
    monkeypatch.setattr(
        f"{FixedScalingPolicy.__mro__[1].__module__}.TrainAutoscalingCoordinatorClient", client
    )
    policy.after_controller_start(MagicMock())
    assert policy.make_decision_for_non_running_worker_group().num_workers == 2
    assert bool(client.mock_calls) is requests


@pytest.mark.parametrize(("watched", "numbers"), [("1", [3, 2, 2]), ("0", [2, 1, 1])])
def test_a_controller_asks_once_for_its_own_replacement(
    watched: str, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setenv("RAY_TRAIN_ENABLE_PREEMPTION_WATCHER", watched)
    monkeypatch.setattr("raycl.training.controller.stand_by", lambda number, began: asked.append(number))
    trainer = RayTrainer(print, began=7.0, run_id="a run", scaling_config=ScalingConfig(num_workers=1))
    assert trainer.train_run_context.run_id == "a run"
    [callback] = [each for each in trainer._create_default_callbacks() if hasattr(each, "began")]
    assert callback.began == 7.0
    for _ in range(3):
        callback.before_init_train_context([])
    assert asked == numbers
