"""Actors of the tests, in a module without torch: Ray imports it in each of their processes."""

import os
import time
from typing import Any

import numpy as np
import ray
from ray.util.placement_group import PlacementGroup, placement_group

from raycl.training.encoder_pool import Weights
from raycl.training.standby import request_standby, stand_by_elsewhere


class TrainController:
    """Reserves resources like Ray Train's controller, which has the same name."""

    def take_room(self) -> PlacementGroup:
        group = placement_group([{"CPU": 0.5}])
        ray.get(group.ready())
        return group


class Other(TrainController):
    """A user's own actor."""


class Probe:
    """An actor whose process another one can replace."""

    def ask(self, env_vars: dict[str, str] | None = None) -> bool:
        return request_standby(env_vars=env_vars)

    def ask_elsewhere(self, book: Any) -> None:
        stand_by_elsewhere(book, workers=2, began=0.0)

    def pid(self) -> int:
        return os.getpid()

    def pid_of_child(self, env_vars: dict[str, str] | None = None) -> int:
        runtime_env = None if env_vars is None else {"env_vars": env_vars}
        self._child: Any = ray.remote(num_cpus=0)(Probe).options(runtime_env=runtime_env).remote()
        return ray.get(self._child.pid.remote())

    def of_child(self, method: str, *arguments: Any) -> Any:
        return ray.get(getattr(self._child, method).remote(*arguments))


class Scaling:
    """Multiplies rows by a weight, and adds the id of its process."""

    def load(self, weights: Weights) -> None:
        self.weight = weights["weight"]

    def encode(self, rows: Any, *, seconds: float = 0.0) -> Any:
        time.sleep(seconds)
        return np.concatenate([rows * self.weight, np.full((len(rows), 1), os.getpid())], axis=1)
