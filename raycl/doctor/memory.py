"""Checks of a recipe: whether workers, pools of encoders, decoded data and bank fit into the memory of the nodes.

The memory of a worker follows from a formula, and from the memory of a row in a forward and backward pass,
which is measured.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import ray

from raycl.config import RunConfig, Stage
from raycl.config.schema import PoolConfig
from raycl.data.embeddings import count_embeddings
from raycl.display import format_bytes
from raycl.doctor.data import DataSummary
from raycl.doctor.estimate import (
    Answers,
    MemoryEstimate,
    available_memory,
    check_gpu,
    check_nodes,
    drawing_bytes,
    has_gpu_of,
    workers_on,
)
from raycl.doctor.memory_profile import MemoryProfile, profile_memory
from raycl.doctor.nodes import Node
from raycl.doctor.result import CheckResult, failed, passed, passed_if
from raycl.errors import RayclError, last_line
from raycl.negatives.placement import nodes_for_a_bank
from raycl.negatives.spec import BankSpec
from raycl.storage import Place
from raycl.training.data_module import known_tokenizer, must_stream
from raycl.training.driver import check_cluster
from raycl.training.miner import TEXTS_TOGETHER
from raycl.training.pools import nodes_for, pools_of
from raycl.training.preflight import check_guide, check_streamed
from raycl.training.stores import bank_spec

OPTIMIZER_STATES = {"adamw": 2, "sgd": 1, "lars": 1, "muon": 2}  # numbers per weight, at most
_BATCHES = 4  # of decoded rows: two wait, one is in use and one is being made
_EMBEDDINGS = 8  # copies of the gathered ones: both views, their gradients, and intermediates of the loss
_TIMEOUT_S = 180.0


def check_memory(
    config: RunConfig, data: DataSummary | None, answers: Answers
) -> Generator[CheckResult, None, float]:
    """Yield the results for a recipe; return the bytes of its gradients, 0 if they could not be measured."""
    answers = [answer for answer in answers if answer.value is not None]
    num_samples = 0 if data is None else data.source.num_rows
    try:
        check_cluster(config, streamed=is_streamed(config, data), report=lambda _: None)
    except RayclError as error:
        yield failed("workers", str(error))
    if config.negatives.guide.query is not None:
        yield _check_guide_table(config, data, answers)
    try:
        profiles = _profile_stages(config)

        def estimate_of(workers: int) -> MemoryEstimate:
            return estimate_memory(
                config.settled(workers),
                profiles,
                num_samples=num_samples,
                row_bytes=0.0 if data is None else data.decoded_bytes / num_samples,
                negatives_per_pair=0.0 if data is None else data.negatives_per_pair,
                texts_per_row=1.0 if data is None else data.texts_per_row,
            )

        estimate = estimate_of(1)  # in the smallest group, where a worker needs the most
    # An encoder of the user's may raise anything.
    except Exception as error:
        remedy = "fix the recipe; the memory of a step could not be measured"
        yield failed("memory of a worker", last_line(error), remedy)
        return 0.0
    num_cpus = sum(answer.node.num_cpus for answer in answers)
    counts = [(answer, workers_on(answer.node, config, num_cpus)) for answer in answers]
    # Ray fills one node before the next.
    groups = [(answer, count, estimate_of(count)) for answer, count in counts if count]
    placed = [(answer, str(count), count * each.host, each) for answer, count, each in groups]
    yield check_nodes(
        "memory of a worker", estimate, placed, lambda shown: shown.remedy(config, on_gpu=False)
    )
    if config.gpu:
        nodes = [answer.node for answer in answers if has_gpu_of(config, answer.node)]
        yield check_gpu("memory of a GPU", estimate, nodes, estimate.remedy(config, on_gpu=True))
    yield from check_pools(config, profiles, estimate_of, answers)
    if data is not None:
        yield check_decoded_data(config, data, answers)
    # The document of a row, or each of its captions or sentences; of a stream, the first one.
    per_row = 1.0 if data is None or is_streamed(config, data) else data.texts_per_row
    per_row += data.negatives_per_pair if data is not None and config.negatives.explicit else 0.0
    yield from _check_bank(config, num_samples, answers, num_documents=round(num_samples * per_row))
    return profiles[0].learned


def check_decoded_data(config: RunConfig, data: DataSummary, answers: Answers) -> CheckResult:
    """Compare the decoded rows with the object stores, by the rule of a run."""
    name = "decoded data"
    rows = f"{data.source.num_rows:,} decoded rows take {format_bytes(data.decoded_bytes)}"
    if is_streamed(config, data):
        try:
            check_streamed(config)
        except RayclError as error:
            return failed(name, f"{rows}; they are streamed: {error}")
        return passed(name, f"{rows}; they are streamed: each epoch reads them again")
    total = sum(answer.node.object_store for answer in answers)
    seen = f"{rows}, held in object stores of {format_bytes(total)}"
    remedy = "set data.cache=stream, or lower data.image_size"
    return passed_if(data.decoded_bytes <= total, name, seen, remedy)


def _check_guide_table(config: RunConfig, data: DataSummary | None, answers: Answers) -> CheckResult:
    """Check the files of a guide, and compare its embeddings of the run's ids with the smallest object store."""
    name, folders = "guide", config.negatives.guide.folders(config.data.kind)
    try:
        check_guide(config)
        counts = [count_embeddings(uri, role) for role, uri in folders.items() if uri is not None]
    except RayclError as error:
        return failed(name, str(error))
    (queries, dim), (documents, _) = counts if len(counts) > 1 else (*counts, (0, 0))
    if data is not None:  # a run keeps the embeddings of its own ids only
        rows = data.source.num_rows
        queries, documents = min(queries, rows), min(documents, round(rows * (1 + data.negatives_per_pair)))
    num_bytes = 2 * (queries + documents) * dim  # float16
    seen = f"embeddings of {dim} numbers take at most {format_bytes(num_bytes)} of each node's object store"
    is_small = all(num_bytes <= answer.node.object_store for answer in answers)
    remedy = "give Ray more (ray start --object-store-memory), or take a guide of shorter embeddings"
    return passed_if(is_small, name, seen, remedy)


def is_streamed(config: RunConfig, data: DataSummary | None) -> bool:
    """Return whether a run would read the rows again in each epoch; without data, if the recipe says so."""
    if data is None:
        return config.data.cache == "stream"
    return must_stream(config, [(data.source, data.source.columns, data.source.num_rows)])


def _check_bank(
    config: RunConfig, num_samples: int, answers: Answers, *, num_documents: int
) -> Iterator[CheckResult]:
    grows_with_data = config.negatives.has_slots or config.negatives.mined.num
    if grows_with_data and not num_samples:
        return
    shards = bank_bytes(config, num_samples, num_documents=num_documents)
    if not shards or not answers:
        return
    ids = {node["NodeID"] for node in nodes_for_a_bank()}
    answers = [answer for answer in answers if answer.node.node_id in ids]
    if not answers:
        seen = "nodes are labeled by their roles, and none that answered is for a bank"
        yield failed("bank", seen, "label one raycl.io/role=memory or raycl.io/role=head")
        return
    largest = max(answers, key=available_memory)
    seen = (
        f"{len(shards)} shard{'' if len(shards) == 1 else 's'} of {format_bytes(max(shards))}, "
        f"the most free memory is {format_bytes(available_memory(largest))} ({largest.node.name})"
    )
    ways = ["lower negatives.capacity" if config.negatives.store == "queue" else "raise bank.shards"]
    if config.negatives.store != "partition" and config.bank.dtype != "float16":
        ways.append("set bank.dtype=float16")
    remedy = f"{', '.join(ways)}, or add a node with more memory"
    yield passed_if(max(shards) <= available_memory(largest), "bank", seen, remedy)


def bank_bytes(config: RunConfig, num_samples: int, *, num_documents: int = 0) -> list[float]:
    """Return the bytes of each shard of the run's bank actors; nothing if it has none.

    ``num_documents`` is the largest number of distinct documents that a miner may search.
    """
    if config.negatives.mined.num:
        return _shard_bytes(_bank_spec(config, num_documents))
    if config.negatives.store == "none" or config.bank.location == "worker":
        return []
    return _shard_bytes(_bank_spec(config, num_samples))


def _bank_spec(config: RunConfig, num_samples: int) -> BankSpec:
    return bank_spec(config, output="bank", name="bank", num_samples=num_samples)


def _shard_bytes(spec: BankSpec) -> list[float]:
    return [float(spec.bytes_of(shard)) for shard in range(spec.num_shards)]


def estimate_memory(
    config: RunConfig,
    profiles: Sequence[MemoryProfile],
    *,
    num_samples: int,
    row_bytes: float,
    negatives_per_pair: float,
    texts_per_row: float = 1.0,
) -> MemoryEstimate:
    """Return the memory of a worker in its largest stage.

    ``profiles`` has one profile per stage; ``row_bytes`` is the size of a decoded row. A row has ``texts_per_row``
    captions or sentences.
    """
    estimates = []
    for number, (stage, measured) in enumerate(zip(config.stages, profiles, strict=True)):
        rows, local_batch = _rows_of_sides(config, stage, negatives_per_pair), config.local_batch_size(stage)
        weights, copy = measured.learned, measured.parameters + measured.buffers
        momentum = config.optimizer.momentum or config.optimizer.name != "sgd"
        parts = {
            "process": measured.process,
            "weights": weights + measured.buffers,
            "gradients": weights,
            "optimizer": weights * (OPTIMIZER_STATES[config.optimizer.name] if momentum else 0),
            "momentum encoder": copy if config.key == "momentum_encoder" else 0.0,
            "averaged weights": 0.0 if config.ema_decay is None else copy,
            "activations": sum(
                _activations(count, stage, row, waiting)
                for count, row, waiting in zip(rows, measured.activations, measured.waiting, strict=True)
            )
            + sum(rows) * measured.predictions,
            "views": sum(count * each for count, each in zip(rows, measured.inputs, strict=True)),
            "images": drawing_bytes(config, local_batch * row_bytes) if config.gpu else 0.0,
            "waiting rows": _BATCHES * local_batch * row_bytes,
            "embeddings": _EMBEDDINGS * stage.batch_size * config.projection_head.dim * 4.0,
            "negatives": _store_bytes(config, num_samples, texts_per_row),
        }
        on_host = {"process", "waiting rows"}
        if config.negatives.has_slots or config.negatives.mined.num:
            on_host.add("negatives")
        on_gpu = frozenset(parts) - on_host if config.gpu else frozenset[str]()
        estimates.append(MemoryEstimate(stage=number, parts=parts, on_gpu=on_gpu))
    return max(estimates, key=lambda estimate: estimate.total)


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


def _rows_of_sides(config: RunConfig, stage: Stage, negatives_per_pair: float) -> list[float]:
    """Return the number of rows that a worker embeds with gradients, for each side or size of views."""
    local_batch = config.local_batch_size(stage)
    num_mined = config.negatives.mined.num
    if not config.has_two_towers:
        # Mined sentences are embedded with the views, which have one size.
        return [float(local_batch * (count + num_mined)) for count in config.views_by_size(stage).values()]
    explicit = config.negatives.explicit
    per_pair = negatives_per_pair if explicit is True else min(float(explicit), negatives_per_pair)
    return [float(local_batch), local_batch * (1.0 + per_pair + num_mined)]


def _activations(num_rows: float, stage: Stage, row: float, waiting: float) -> float:
    """Return the bytes of the rows with their graph, and of the rows that wait for other chunks."""
    if stage.chunk_size is None:
        return num_rows * row
    return min(num_rows, stage.chunk_size * max(1, stage.cached_chunks)) * row + num_rows * waiting


def _store_bytes(config: RunConfig, num_samples: int, texts_per_row: float) -> float:
    """Return the bytes of the store in a worker: the whole queue, its part of a memory bank, or fetched rows.

    With mined negatives, it is the table: a document and its step for each candidate of each text.
    """
    if config.negatives.mined.num:
        return 8.0 * num_samples * texts_per_row * config.negatives.mined.candidates
    if config.negatives.store == "none":
        return 0.0
    spec = _bank_spec(config, num_samples)
    whole = sum(_shard_bytes(spec))
    if config.negatives.store == "queue":
        # The loss reads rows of float16 as float32.
        return whole + (4.0 * spec.capacity * spec.dim if spec.dtype == "float16" or config.gpu else 0.0)
    drawn = config.negatives.num_negatives if spec.kind == "memory_bank" else 0
    fetched = 2.0 * 4 * spec.dim * (drawn + config.stages[0].batch_size)
    return 16.0 * num_samples + fetched + (whole if config.bank.location == "worker" else 0.0)


def _profile_stages(config: RunConfig) -> list[MemoryProfile]:
    tokenizer = known_tokenizer(config, Place("."), resumed=False) if config.has_texts else None
    # A new process for each: memory that an earlier one left behind would count.
    task: Any = ray.remote(num_cpus=0, max_retries=0, max_calls=1)(profile_memory)  # pyright: ignore
    return ray.get([task.remote(config, stage, tokenizer) for stage in config.stages], timeout=_TIMEOUT_S)
