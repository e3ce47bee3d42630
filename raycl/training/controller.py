"""Ray's trainer, and what a lost controller leaves in the cluster: the room that it had taken for its workers."""

import time
from collections.abc import Iterator
from typing import Any, final

import ray
from ray._private import state as ray_state
from ray.core.generated import gcs_pb2
from ray.train.torch import TorchTrainer
from ray.train.v2._internal import constants
from ray.train.v2._internal.callbacks.datasets import DatasetsCallback
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

# The controller reads it, and Ray brings it only what it has on this list.
constants.ENV_VARS_TO_PROPAGATE.add("TORCH_PROCESS_GROUP_SHUTDOWN_TIMEOUT_S")

_Group: Any = gcs_pb2.PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]


@final
class Trainer(TorchTrainer):
    """A ``TorchTrainer`` without those of Ray's helpers that raycl has no use for.

    The cleaner of placement groups is a detached actor a group, and where there is no dashboard, as in the Ray
    that raycl starts on one machine, it neither sees that its controller has died nor ever ends: each death
    costs the cluster what the workers had, until no task that reads finds a CPU. The driver removes what is
    left instead, and where that dies, Ray does.

    The manager of data sets would be waited for by every group, and raycl streams its own.
    """

    def _create_default_callbacks(self) -> list[Any]:
        found = super()._create_default_callbacks()
        kept = [each for each in found if not isinstance(each, PlacementGroupCleanerCallback)]
        context = _DataContextAlone(self.train_run_context, datasets={})
        return [context if isinstance(each, DatasetsCallback) else each for each in kept]


@final
class _DataContextAlone(DatasetsCallback):
    """Bring the workers the driver's settings of Ray Data, and no data.

    The controller imports this module for it, and with it nothing that is only the workers'.
    """

    def before_init_train_context(self, workers: list[Any]) -> dict[str, list[Any]]:
        return {}


def free_abandoned_room(*, patience_s: float = 5.0) -> int:
    """Remove the placement groups of this driver's controllers that have died; return how many there were.

    Ray may know a moment later than the driver that a controller is dead: those that seem to live are looked
    at again for a while.
    """
    until = time.monotonic() + patience_s
    freed: set[bytes] = set()  # one that was removed may still be told of for a moment
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
    """Yield what Ray knows of the groups that Ray Train has made for this driver; nobody else's are touched."""
    job = ray.get_runtime_context().get_job_id()
    accessor: Any = ray_state.state._connect_and_get_accessor()
    for group in map(_Group.FromString, accessor.get_placement_group_table()):
        is_own = group.creator_job_id.hex() == job and not group.is_detached
        if is_own and group.state != _Group.REMOVED and _is_controller(group.creator_actor_id):
            yield group


def _is_controller(actor_id: bytes) -> bool:
    # Groups of the driver itself name an actor of nothing but ones, which nobody knows.
    facts = ray_state.actors(actor_id.hex()) if set(actor_id) - {0xFF} else None
    return bool(facts) and facts["ActorClassName"] == "TrainController"
