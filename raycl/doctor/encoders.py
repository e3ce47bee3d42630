"""Checks of a recipe's pools of encoders: whether they fit into the memory of nodes and GPUs beside the workers."""

from collections.abc import Callable, Iterator, Sequence

from raycl.config import RunConfig
from raycl.config.schema import PoolConfig
from raycl.doctor.estimate import Answers, MemoryEstimate, check_gpu, check_nodes, workers_on
from raycl.doctor.memory_profile import MemoryProfile
from raycl.doctor.nodes import Node
from raycl.doctor.result import CheckResult
from raycl.training.miner import TEXTS_TOGETHER
from raycl.training.pools import nodes_for, pools_of


def check_pools(
    config: RunConfig,
    profiles: Sequence[MemoryProfile],
    estimate_of: Callable[[int], MemoryEstimate],
    answers: Answers,
) -> Iterator[CheckResult]:
    """Yield the results for each pool of encoders; ``estimate_of`` returns the memory of one of so many workers."""
    num_cpus = sum(answer.node.num_cpus for answer in answers)
    for section, pool in pools_of(config).items():
        encoder = estimate_encoder(config.settled(1), section, profiles)  # keys of the smallest group
        labeled = {node["NodeID"] for node in nodes_for(pool)}
        chosen = [answer for answer in answers if answer.node.node_id in labeled]
        placed = []
        for answer in chosen:
            workers = workers_on(answer.node, config, num_cpus)
            if encoders := _encoders_on(answer.node, config, pool, workers, num_cpus):
                text = f"{encoders} beside {workers} worker{'' if workers == 1 else 's'}"
                num_bytes = workers * estimate_of(workers).host + encoders * encoder.host
                placed.append((answer, text, num_bytes, encoder))
        name = f"memory of an encoder of {section}"
        remedy = f"lower {section}.actors, set {section}.node_label to nodes without workers, or add nodes"
        yield check_nodes(name, encoder, placed, lambda _, remedy=remedy: remedy)
        if pool.gpus_per_actor:
            nodes = [answer.node for answer in chosen]
            name, remedy = f"GPU of an encoder of {section}", f"raise {section}.gpus_per_actor"
            yield check_gpu(name, encoder, nodes, remedy, share=min(1.0, pool.gpus_per_actor))


def estimate_encoder(config: RunConfig, section: str, profiles: Sequence[MemoryProfile]) -> MemoryEstimate:
    """Return the memory of an encoder of this section's pool, in its largest stage."""
    estimates = []
    for number, (stage, measured) in enumerate(zip(config.stages, profiles, strict=True)):
        if section == "momentum_encoder":
            num_views = config.views[0].count if config.has_prediction_head else 1
            rows = num_views * config.local_batch_size(stage)
            together = min(rows, stage.chunk_size or rows)
        else:
            rows = together = TEXTS_TOGETHER
        parts = {
            "process": measured.process,
            "weights": 2 * (measured.parameters + measured.buffers),  # the next ones are loaded beside them
            "activations": together * max(measured.encoded),
            "views": rows * max(measured.inputs),
        }
        on_gpu = (
            frozenset(parts) - {"process"} if pools_of(config)[section].gpus_per_actor else frozenset[str]()
        )
        estimates.append(MemoryEstimate(stage=number, parts=parts, on_gpu=on_gpu))
    return max(estimates, key=lambda estimate: estimate.total)


def _encoders_on(node: Node, config: RunConfig, pool: PoolConfig, workers: int, num_cpus: float) -> int:
    """Return the most encoders of a pool that Ray may place on a node beside its workers."""
    num_workers = max(config.workers_of(stage) for stage in config.stages)
    cpus = config.cpus_per_worker or (1.0 if num_cpus >= num_workers else 0.0)
    most = min(pool.actors, int((node.num_cpus - workers * cpus) / pool.cpus_per_actor + 1e-6))
    if pool.gpus_per_actor:
        most = min(most, int((node.num_gpus - workers * config.gpu) / pool.gpus_per_actor + 1e-6))
    return max(0, most)
