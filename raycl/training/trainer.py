"""Ray's trainer, and what a lost controller leaves in the cluster: the room that it had taken for its workers."""

from typing import Any, final

import ray
from ray._private import state as ray_state
from ray.core.generated import gcs_pb2
from ray.train.torch import TorchTrainer
from ray.train.v2._internal.callbacks.placement_group_callback import PlacementGroupCleanerCallback
from ray.util.placement_group import PlacementGroup, remove_placement_group

_Group: Any = gcs_pb2.PlacementGroupTableData  # pyright: ignore[reportAttributeAccessIssue]


@final
class Trainer(TorchTrainer):
    """A ``TorchTrainer`` without Ray's own cleaner of placement groups.

    That is a detached actor a group, and where there is no dashboard, as in the Ray that raycl starts on one
    machine, it neither sees that its controller has died nor ever ends: each death costs the cluster what
    the workers had, until no task that reads finds a CPU. The driver removes what is left instead, and
    where that dies, Ray does.
    """

    def _create_default_callbacks(self) -> list[Any]:
        found = super()._create_default_callbacks()
        return [each for each in found if not isinstance(each, PlacementGroupCleanerCallback)]


def free_abandoned_room() -> int:
    """Remove the placement groups of this driver's controllers that have died; return how many there were."""
    job = ray.get_runtime_context().get_job_id()
    accessor: Any = ray_state.state._connect_and_get_accessor()
    groups = map(_Group.FromString, accessor.get_placement_group_table())
    abandoned = [
        group.placement_group_id
        for group in groups
        if group.creator_job_id.hex() == job
        and group.creator_actor_dead
        and group.state != _Group.REMOVED
        # Those of the driver itself have no actor, which counts as a dead one.
        and set(group.creator_actor_id) - {0xFF}
    ]
    for each in abandoned:
        remove_placement_group(PlacementGroup(ray.PlacementGroupID(each)))
    return len(abandoned)
