"""The side of Ray Train's controller: its trainer, the outcomes of worker groups, leaked placement groups.

The controller imports this module to unpickle them, so the module imports neither code of the workers nor torch.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, final

import ray
from ray._private import state as ray_state
from ray.core.generated import gcs_pb2
from ray.exceptions import GetTimeoutError
from ray.train import ScalingConfig
from ray.train._internal.utils import get_address_and_port
from ray.train.backend import Backend, BackendConfig
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.scaling_policy.fixed import FixedScalingPolicy
from ray.train.v2._internal.util import TrainingFramework
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.util.placement_group import PlacementGroup, remove_placement_group

from raycl.ray_runtime import helper_actor, is_own_ray
from raycl.training.standby import importing, request_standby, stand_by

# The controller reads it, and Ray passes on only the variables of this list.
constants.ENV_VARS_TO_PROPAGATE.add("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S")

_RELEASE_S = 60.0  # that a group of workers waits at most for pools of encoders

_Group: Any = gcs_pb2.PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]


@final
@dataclass(frozen=True)
class Finished:
    """The end of the run; ``metrics`` are the last ones, with ``step``, ``samples``, ``epoch`` and ``seconds``."""

    metrics: dict[str, Any]


@final
@dataclass(frozen=True)
class ResizeRequested:
    """The next stage needs another number of workers, within these limits."""

    min_workers: int
    max_workers: int


@final
@dataclass(frozen=True)
class Stopped:
    """A stop was requested; the checkpoint of this step is saved."""

    step: int


Outcome = Finished | ResizeRequested | Stopped


def prestart_controller() -> None:
    """Start the processes of the first run's controller and its actor early, on a Ray that raycl has started.

    Later runs find processes that stand by.
    """
    if is_own_ray():
        _prestart(ray.get_runtime_context().get_job_id())


@cache  # once for each job
def _prestart(_: str) -> None:
    request_standby(2, env_vars=controller_environment())


def controller_environment() -> dict[str, str]:
    """Return the environment variables of the controller and of the actors that it starts."""
    own = {"RAY_WARN_BLOCKING_GET_INSIDE_ASYNC": "0"} | constants.get_env_vars_to_propagate()
    return own | importing("import_controller")


@final
class _Unrequested(FixedScalingPolicy):
    """The policy of a fixed number of workers that requests no resources, and starts no actor that collects requests.

    Only autoscalers and the tasks of Ray Data read them.
    """

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        pass

    def _maybe_send_resource_request(self) -> None:
        pass


@final
class RayTrainer(DataParallelTrainer):
    """A ``TorchTrainer`` without two of Ray's callbacks, and with a controller that another process can replace.

    Only the workers import torch, which takes the controller seconds.

    The placement group cleaner is a detached actor. Without a dashboard, as in the Ray that raycl starts on
    one machine, it never notices that its controller died and never ends: each crash leaks the workers'
    CPUs until data tasks can no longer be scheduled. The driver removes leaked placement groups
    instead, and if the driver dies, Ray does.

    The data set manager would delay every group, and raycl streams its own data.
    """

    def __init__(
        self,
        *args: Any,
        began: float,
        scaling_config: ScalingConfig,
        pools: Sequence[Any] = (),
        requests_resources: bool = True,
        run_id: str | None = None,
        **kwargs: Any,
    ) -> None:
        """``began`` is when the run began, in seconds since 1970; ``pools`` are actors whose ``release`` stops encoders.
        Without ``requests_resources``, which needs a fixed number of workers, neither an autoscaler nor the tasks of Ray
        Data learn of them.

        Trainers of one ``run_id`` share a request for resources. A controller that was killed leaves its request, which
        would reserve the workers' resources for three more minutes.
        """
        group = _ProcessGroup(gpu=bool(scaling_config.use_gpu))
        super().__init__(*args, scaling_config=scaling_config, backend_config=group, **kwargs)
        if run_id is not None:
            object.__setattr__(self.train_run_context, "run_id", run_id)  # frozen, and no argument of Ray's
        self._began, self._pools = began, tuple(pools)
        self._requests_resources = requests_resources

    def _initialize_and_run_controller(self, **controller_init_kwargs: Any) -> Any:
        """Run the controller on the driver's node, with an environment of its own."""
        if not self._requests_resources:
            controller_init_kwargs["scaling_policy"] = _Unrequested(self.scaling_config)
        actor = helper_actor(TrainController, runtime_env={"env_vars": controller_environment()})
        controller = actor.remote(**controller_init_kwargs)
        ray.get(controller.run.remote())
        return ray.get(controller.get_result.remote())

    def _create_default_callbacks(self) -> list[Any]:
        found = super()._create_default_callbacks()
        kept = [each for each in found if not isinstance(each, PlacementGroupCleanerCallback)]
        context = _DataContextOnly(self.train_run_context, datasets={})
        context.began, context.pools = self._began, self._pools
        return [context if isinstance(each, DatasetsCallback) else each for each in kept]


@final
@dataclass(frozen=True)
class _ProcessGroup(BackendConfig):
    """Ray's ``TorchConfig``, without torch in this process."""

    gpu: bool

    @property
    def backend_cls(self) -> type[Backend]:
        return _TorchBackend

    @property
    def train_func_context(self) -> Any:
        return _on_own_gpu

    @property
    def framework(self) -> Any:
        return TrainingFramework.TORCH


@final
class _TorchBackend(Backend):
    """Ray's backend of the same name; a worker calls its functions."""

    share_cuda_visible_devices = True

    def on_start(self, worker_group: Any, backend_config: Any) -> None:
        address, port = worker_group.execute_single(0, get_address_and_port)
        worker_group.execute(_join_group, address, port, "nccl" if backend_config.gpu else "gloo")

    def on_shutdown(self, worker_group: Any, backend_config: Any) -> None:
        left = worker_group.execute_async(_leave_group, is_group=len(worker_group) > 1)
        with contextlib.suppress(GetTimeoutError):
            ray.get(left, timeout=float(os.environ.get("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S", "5")))


def _join_group(address: str, port: int, backend: str) -> None:
    from ray.train.torch import config

    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(port)}
    config._set_torch_distributed_env_vars()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    config._setup_torch_process_group(backend, rank, size, "env://")


def _leave_group(*, is_group: bool) -> None:
    from ray.train.torch import config

    config._shutdown_torch(destroy_process_group=is_group)


@contextlib.contextmanager
def _on_own_gpu() -> Iterator[None]:
    from ray.train.torch import config

    with config.TorchConfigContextManager():
        yield


@final
class _DataContextOnly(DatasetsCallback):
    """Pass the driver's settings of Ray Data to the workers, and no data sets."""

    began, pools = 0.0, tuple[Any, ...]()  # as in ``RayTrainer``
    _has_own = False

    def before_worker_group_start(self, worker_group_context: Any) -> None:
        # The encoders hold CPUs and GPUs that the group may wait for; they start again with its weights.
        released = [each.release.remote() for each in self.pools]
        if released:
            ray.wait(released, num_returns=len(released), timeout=_RELEASE_S)

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        # For the actors that Ray Train's controller starts for each group, and once for itself.
        has_watcher = os.environ.get(constants.ENABLE_PREEMPTION_WATCHER_ENV_VAR) != "0"
        stand_by(1 + has_watcher + (not self._has_own), began=self.began)
        self._has_own = True
        return {}


def remove_leaked_placement_groups(*, patience_s: float = 5.0) -> int:
    """Remove the placement groups of this driver's dead controllers; return their number.

    Ray may learn of a dead controller after the driver does, so controllers that seem alive are checked
    again for ``patience_s`` seconds.
    """
    until = time.monotonic() + patience_s
    freed: set[bytes] = set()  # Ray may list a removed group for a moment
    while True:
        groups = list(_groups_of_controllers())
        for group in groups:
            if group.creator_actor_dead:
                remove_placement_group(PlacementGroup(ray.PlacementGroupID(group.placement_group_id)))
                freed.add(group.placement_group_id)
        if all(group.creator_actor_dead for group in groups) or time.monotonic() > until:
            return len(freed)
        time.sleep(0.2)


def _groups_of_controllers() -> Iterator[Any]:
    """Yield Ray's records of the placement groups that Ray Train created for this driver, and no others."""
    job = ray.get_runtime_context().get_job_id()
    accessor: Any = ray_state.state._connect_and_get_accessor()
    for group in map(_Group.FromString, accessor.get_placement_group_table()):
        is_own = group.creator_job_id.hex() == job and not group.is_detached
        if is_own and group.state != _Group.REMOVED and _is_controller(group.creator_actor_id):
            yield group


def _is_controller(actor_id: bytes) -> bool:
    # Placement groups of the driver itself have an invalid actor id of ones only.
    facts = ray_state.actors(actor_id.hex()) if set(actor_id) - {0xFF} else None
    return bool(facts) and facts["ActorClassName"] == "TrainController"
