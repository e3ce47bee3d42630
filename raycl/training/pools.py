"""The pools of encoders of a run: their settings, and whether they fit beside the workers."""

from typing import Any

import ray
import torch

from raycl.config import RunConfig
from raycl.config.schema import PoolConfig
from raycl.errors import ConfigError
from raycl.gpus import available_cores
from raycl.training.process import prepare_device, prepare_process


def pools_of(config: RunConfig) -> dict[str, PoolConfig]:
    """Return the settings of the pools that a run starts, by the name of their section."""
    pools: dict[str, PoolConfig] = {}
    if config.uses_key_pool:
        pools["momentum_encoder"] = config.momentum_encoder
    if config.negatives.mined.num:
        pools["negatives.mined"] = config.negatives.mined
    return pools


def prepare_encoder(config: RunConfig, pool: PoolConfig) -> tuple[RunConfig, torch.device]:
    """Set up the process of an encoder of this pool; return the configuration for its device, its GPU if it has one."""
    prepare_process(min(available_cores(), max(1, int(pool.cpus_per_actor))))
    # Ray does not hide the node's GPUs from an actor without any: they are the workers'.
    device = torch.device("cuda" if pool.gpus_per_actor and torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and config.precision == "auto":  # which is bfloat16 for the GPUs of the workers
        config = config.model_copy(update={"precision": "float32"})
    return prepare_device(config, device), device


def nodes_for(pool: PoolConfig) -> list[dict[str, Any]]:
    """Return the living nodes that have the label of a pool."""
    label = pool.labels.items()
    return [node for node in ray.nodes() if node["Alive"] and label <= node["Labels"].items()]


def check_pools(config: RunConfig, *, workers: int) -> None:
    """Raise ``ConfigError`` if the fewest encoders have too few CPUs or GPUs beside the workers, or on nodes with their label."""
    have = ray.cluster_resources()
    num_cpus, num_gpus = have.get("CPU", 0.0), max(0.0, have.get("GPU", 0.0) - workers * config.gpu)
    for name, pool in pools_of(config).items():
        least, _ = pool.actor_range
        if pool.node_label and not nodes_for(pool):
            raise ConfigError(
                f"no node has the label {pool.node_label} of {name}.node_label; name one that a node has, or set "
                "autoscaling=true if the cluster will grow"
            )
        cpus = least * pool.cpus_per_actor
        if cpus >= num_cpus:  # the workers need some too
            raise ConfigError(
                f"{name} needs {cpus:g} CPUs for {least} actors, and the cluster has {num_cpus:g}; lower "
                f"{name}.cpus_per_actor, or set autoscaling=true if the cluster will grow"
            )
        need = least * pool.gpus_per_actor
        if need > num_gpus:
            raise ConfigError(
                f"{name} needs {need:g} GPUs for {least} actors, and the workers leave {num_gpus:g}; lower "
                f"{name}.gpus_per_actor, or set autoscaling=true if the cluster will grow"
            )
        if (room := _room_for(pool)) < least:
            labeled = f" with the label {pool.node_label}" if pool.node_label else ""
            raise ConfigError(
                f"{name} has {least} actors of {pool.cpus_per_actor:g} CPUs and {pool.gpus_per_actor:g} GPUs, and the "
                f"nodes{labeled} have room for {room}; lower {name}.cpus_per_actor or gpus_per_actor, or set "
                f"{name}.min_actors={room}"
            )


def _room_for(pool: PoolConfig) -> int:
    """Return how many actors of a pool all nodes with its label have room for, each on one node."""
    needs = {"CPU": pool.cpus_per_actor, "GPU": pool.gpus_per_actor}
    return sum(
        min(int(node["Resources"].get(name, 0.0) / need + 1e-6) for name, need in needs.items() if need)
        for node in nodes_for(pool)
    )
