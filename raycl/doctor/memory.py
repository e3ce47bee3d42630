"""Whether a recipe fits: its workers' memory, its bank and its decoded data beside what the nodes have."""

from collections.abc import Iterator, Sequence
from typing import Any, final

import ray

from raycl.cluster import check_resources
from raycl.config import RunConfig
from raycl.doctor.cluster import GROW, gpu_memory
from raycl.doctor.data import Seen
from raycl.doctor.machine import Machine
from raycl.doctor.memory_estimate import Need, bank_bytes, worker_need
from raycl.doctor.memory_profile import Measured, measure
from raycl.doctor.nodes import Answer, Node, ask, why
from raycl.doctor.result import CheckResult, size
from raycl.errors import RayclError
from raycl.negatives.bank_actor import nodes_for_a_bank
from raycl.storage import Place
from raycl.training.data_module import known_tokenizer
from raycl.training.driver import cpus_of_a_worker, spare_cpus

_PATIENCE_S = 180.0
_RESERVED = 0.05  # of a node's memory: above 95% Ray ends workers
_CUDA_BYTES = 2.0**30  # of a GPU: context, cuDNN's workspaces, blocks that the allocator keeps
_SMALLER = "lower --batch-size, set stages.{stage}.chunk_size, or use more workers and nodes"


@final
class RoomExam:
    """Measure what a recipe needs by a task, and compare; ``seen`` are the data, if they were looked at."""

    def __init__(self, config: RunConfig, seen: Seen | None, machines: Sequence[Answer[Machine]]) -> None:
        self._config, self._seen = config, seen
        self._machines = [answer for answer in machines if answer.value is not None]
        self.gradient_bytes = 0.0

    @property
    def num_samples(self) -> int:
        """Rows of the data; none are known without them."""
        return 0 if self._seen is None else self._seen.source.num_rows

    def findings(self) -> Iterator[CheckResult]:
        """Yield what was found; never raises raycl's own errors."""
        yield from self._judged_workers()
        try:
            need = self._need()
        # An encoder of the user's own may raise anything.
        except Exception as error:
            seen = str(error) if isinstance(error, RayclError) else why(error)
            yield CheckResult(good=False, name="memory of a worker", seen=seen, remedy=_UNMEASURED)
            return
        yield self._judged_worker(need)
        if self._config.gpu:
            yield self._judged_gpu(need)
        if self._seen is not None:
            yield self._judged_data(self._seen)
        yield from self._judged_bank()

    def _need(self) -> Need:
        config, seen = self._config, self._seen
        tokenizer = known_tokenizer(config, Place("."), resumed=False) if config.has_texts else None
        # A process of its own each: what one has left behind would count for the next.
        task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(measure)  # pyright: ignore
        refs = [task.remote(config, stage, tokenizer) for stage in config.stages]
        measured: list[Measured] = ray.get(refs, timeout=_PATIENCE_S)
        self.gradient_bytes = measured[0].parameters
        rows = max(1, self.num_samples)
        return worker_need(
            config,
            measured,
            num_samples=self.num_samples,
            row_bytes=0.0 if seen is None else seen.decoded_bytes / rows,
            negatives=0.0 if seen is None else seen.negatives_a_row,
        )

    def _judged_workers(self) -> Iterator[CheckResult]:
        """Refuse what a run refuses: more workers than the cluster has room for."""
        config = self._config
        if config.autoscaling:
            return
        workers = max(config.worker_range(stage)[0] for stage in config.stages)
        streamed = self._is_streamed()
        try:
            check_resources(
                workers=workers,
                cpus_per_worker=cpus_of_a_worker(config, workers, streamed=streamed),
                gpu=config.gpu,
                spare_cpus=spare_cpus(streamed),
            )
        except RayclError as error:
            yield CheckResult(good=False, name="workers", seen=str(error))

    def _judged_worker(self, need: Need) -> CheckResult:
        host = need.on(gpu=False)
        seen = f"about {size(host)} ({need})"
        if self._config.gpu:
            seen = f"about {size(host)} beside the GPU"
        nodes = [(answer, self._workers_on(answer.node)) for answer in self._machines]
        nodes = [(answer, count) for answer, count in nodes if count]
        if not nodes:
            return CheckResult(
                good=True,
                name="memory of a worker",
                seen=f"{seen}; no node is here now that would hold one, so nothing to compare ({GROW})",
            )
        answer, count = min(nodes, key=lambda each: _room_of(each[0]) - each[1] * host)
        room = _room_of(answer)
        good = count * host <= room
        held = f"{count} on {answer.node.name}, which has {size(max(0.0, room))} free"
        return CheckResult(
            good=good,
            name="memory of a worker",
            seen=f"{seen}; {held}",
            remedy="" if good else self._smaller(need),
        )

    def _judged_gpu(self, need: Need) -> CheckResult:
        name, wanted = "memory of a GPU", need.on(gpu=True) + _CUDA_BYTES
        seen = f"about {size(wanted)} ({need})"
        nodes = [answer.node for answer in self._machines if answer.node.num_gpus >= 1]
        found = [memory for answer in ask(nodes, gpu_memory, num_gpus=1) for _, memory in answer.value or ()]
        if not found:
            return CheckResult(
                good=True, name=name, seen=f"{seen}; no GPU could be looked at now, so nothing to compare"
            )
        good = wanted <= min(found)
        remedy = "" if good else self._smaller(need)
        return CheckResult(
            good=good, name=name, seen=f"{seen}; the smallest has {size(min(found))}", remedy=remedy
        )

    def _judged_data(self, seen: Seen) -> CheckResult:
        """Compare the decoded rows with the object stores, by the rule that a run follows."""
        wanted = seen.decoded_bytes
        rows = f"{seen.source.num_rows:,} decoded rows take {size(wanted)}"
        if self._is_streamed():
            return CheckResult(
                good=True, name="decoded data", seen=f"{rows}; they are streamed, read anew each epoch"
            )
        store = sum(self._stores())
        good = wanted <= store
        return CheckResult(
            good=good,
            name="decoded data",
            seen=f"{rows}, held in object stores of {size(store)}",
            remedy="" if good else "set data.cache=stream, or lower data.image_size",
        )

    def _is_streamed(self) -> bool:
        """Whether a run would read the rows anew in each epoch; without data, as far as the recipe says."""
        cache = self._config.data.cache
        if cache != "auto" or self._seen is None:
            return cache == "stream"
        return self._seen.decoded_bytes > min(self._stores()) / 2

    def _stores(self) -> list[float]:
        return [answer.node.object_store for answer in self._machines] or [0.0]

    def _judged_bank(self) -> Iterator[CheckResult]:
        config = self._config
        if config.negatives.store == "memory_bank" and not self.num_samples:
            return  # a slot a sample, and nobody said how many
        shards = bank_bytes(config, self.num_samples)
        chosen = {node["NodeID"] for node in nodes_for_a_bank()}
        machines = [answer for answer in self._machines if answer.node.node_id in chosen]
        if not shards or not self._machines:
            return
        if not machines:
            yield CheckResult(
                good=False,
                name="bank",
                seen="nodes are labeled by their roles, and none of those that answered is for a bank",
                remedy="label one raycl.io/role=memory or raycl.io/role=head",
            )
            return
        most = max(machines, key=_room_of)
        good = max(shards) <= _room_of(most)
        seen = (
            f"{len(shards)} shard{'' if len(shards) == 1 else 's'} of {size(max(shards))}, "
            f"the most free memory is {size(_room_of(most))} ({most.node.name})"
        )
        remedy = "" if good else "raise bank.shards, set bank.dtype=float16, or add a node with more memory"
        yield CheckResult(good=good, name="bank", seen=seen, remedy=remedy)

    def _workers_on(self, node: Node) -> int:
        """Return how many workers may come to lie on a node: Ray fills one before it takes the next."""
        config = self._config
        most = max(config.workers_of(stage) for stage in config.stages)
        if config.gpu:
            return min(most, int(node.num_gpus))
        cpus = config.cpus_per_worker
        if cpus is None:
            # Where workers are more than CPUs, each takes a part of one.
            return min(most, int(node.num_cpus)) if self._all_cpus() >= most else most if node.num_cpus else 0
        return min(most, int(node.num_cpus / cpus))

    def _all_cpus(self) -> float:
        return sum(answer.node.num_cpus for answer in self._machines)

    def _smaller(self, need: Need) -> str:
        parts = need.parts
        if parts["negatives"] > max(parts["activations"], parts["rows that wait"]):
            return "lower negatives.capacity, or set bank.dtype=float16"
        if parts["weights"] > parts["activations"]:
            return "take a smaller encoder, or nodes with more memory"
        return _SMALLER.format(stage=need.stage)


_UNMEASURED = "mend the recipe; what a step needs could not be measured"


def _room_of(answer: Answer[Machine]) -> float:
    """Return what may still be used of a node's memory."""
    machine = answer.value
    return 0.0 if machine is None else machine.free_memory - _RESERVED * machine.memory
