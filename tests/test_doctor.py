"""The doctor without a cluster: files, memory estimates and measurements, and its command."""

import itertools
import socket
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from raycl.api import plan_examined as plan
from raycl.cli.plan import command_settings
from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.sources import Fragment
from raycl.display import format_bytes
from raycl.doctor.checks import check_gpus, check_network
from raycl.doctor.data import MAX_FRAGMENTS, DataSummary, SampledRow, check_data, spread
from raycl.doctor.estimate import ALLOCATOR, CUDA_BYTES, MemoryEstimate
from raycl.doctor.memory import (
    bank_bytes,
    check_decoded_data,
    check_memory,
    check_pools,
    estimate_encoder,
    estimate_memory,
    is_streamed,
)
from raycl.doctor.memory_profile import MemoryProfile, peak_bytes, profile_memory
from raycl.doctor.nodes import (
    Node,
    NodeAnswer,
    NodeInfo,
    alive_nodes,
    describe_node,
    network_address,
    reachable_ports,
    versions,
)
from raycl.doctor.result import CheckResult
from raycl.doctor.storage import check_storage, delete_file, read_files, write_file
from raycl.errors import ConfigError, StorageError
from raycl.models.build import build_towers
from raycl.optim import build_optimizer
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training.preflight import column_names
from tests.images import write_digits
from tests.test_cli import run_raycl

ONE = MemoryProfile(
    process=1e6, parameters=4e3, buffers=0.0, activations=(100.0,), waiting=(7.0,), inputs=(10.0,)
)
TWO = MemoryProfile(
    process=0.0, parameters=4.0, buffers=0.0, activations=(100.0, 10.0), waiting=(0.0, 0.0), inputs=(0.0, 0.0)
)


def small(name: str = "simclr", **settings: Any) -> RunConfig:
    return override(recipe(name, image_size=32), settings)


def parts(config: RunConfig, measured: MemoryProfile = ONE, negatives: float = 0.0) -> dict[str, float]:
    profiles = [measured] * len(config.stages)
    return estimate_memory(
        config, profiles, num_samples=1_000, row_bytes=0.0, negatives_per_pair=negatives
    ).parts


def test_a_result_is_one_line_even_if_the_error_has_several() -> None:
    assert (
        str(CheckResult(good=False, name="data", seen="a\n  b", remedy="mend it")) == "✗ data: a b -> mend it"
    )


def test_cached_files_of_a_container_count_as_free_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "proc/meminfo": "MemTotal: 4000000 kB\nMemAvailable: 3500000 kB\n",
        "sys/fs/cgroup/memory.max": "1000000\n",
        "sys/fs/cgroup/memory.current": "900000\n",
        "sys/fs/cgroup/memory.stat": "anon 150000\nfile 750000\ninactive_file 500000\nactive_file 200000\n",
    }
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    monkeypatch.setattr("raycl.doctor.nodes.Path", lambda path: tmp_path / str(path).lstrip("/"))
    monkeypatch.setattr("raycl.doctor.nodes.versions", dict)
    info = describe_node()
    assert (info.memory, info.free_memory) == (1_000_000, 800_000)
    (tmp_path / "sys/fs/cgroup/memory.max").write_text("max\n")
    assert describe_node().free_memory == 3_500_000 * 1024


def test_the_storage_check_reads_back_its_file_and_deletes_it(tmp_path: Path) -> None:
    folder = Place(str(tmp_path))
    assert write_file(folder, "mine") == ""
    assert read_files(folder, {"mine": "a"}) == []
    (tmp_path / "mine").write_text("yours")
    assert read_files(folder, {"mine": "a", "other": "b"}) == [
        "sees other bytes in the file of a",
        "does not see the file of b",
    ]
    assert delete_file(folder, "mine") == delete_file(folder, "mine") == ""
    assert list(tmp_path.iterdir()) == []


def test_only_an_output_with_a_run_is_said_to_need_resume(tmp_path: Path) -> None:
    output = tmp_path / "run"
    output.mkdir()
    assert "--resume" not in check_storage(str(output), []).seen
    (output / "config.yaml").write_text("")
    found = check_storage(str(output), [])
    assert found.good
    assert found.seen.endswith(
        f"; {output} holds an earlier run, so raycl train needs --resume or another --output"
    )


def test_an_output_that_train_refuses_in_a_job_is_red(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    found = check_storage("runs/first", [])
    assert not found.good
    assert "lies in Ray's copy of the submitted folder" in found.seen


def test_no_folder_is_created_on_a_node_without_it(tmp_path: Path) -> None:
    assert write_file(Place(str(tmp_path / "runs")), "mine") == ""
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "runs").write_text("a file")
    assert "cannot write" in write_file(Place(str(tmp_path / "runs")), "mine")


def test_a_port_is_public_unless_it_listens_on_loopback_only() -> None:
    with socket.socket() as inside, socket.socket() as outside:
        inside.bind(("127.0.0.1", 0))
        outside.bind(("0.0.0.0", 0))
        ports = [each.getsockname()[1] for each in (inside, outside)]
        for each in (inside, outside):
            each.listen()
        found = reachable_ports(ports)
    # A machine without a network has no address that others could use.
    assert found in ([ports[1]], [])
    assert bool(found) == (network_address() is not None)


def test_the_version_of_raycl_includes_a_fingerprint_of_its_source() -> None:
    found = versions()
    assert found["torch"] == torch.__version__.partition("+")[0] or found["torch"] == torch.__version__
    assert found["raycl"].count("(") == 1
    assert found == versions()


def test_estimated_memory_depends_on_rows_workers_and_chunks() -> None:
    config = small(**{"stages.0.batch_size": 64})
    assert parts(config)["activations"] == 128 * 100  # both views
    assert parts(small(**{"stages.0.batch_size": 64, "workers": 2}))["activations"] == 64 * 100
    chunked = small(**{"stages.0.batch_size": 64, "stages.0.chunk_size": 16})
    # A part of all views is stored; only one chunk has a graph.
    assert parts(chunked)["activations"] == pytest.approx(16 * 100 + 128 * 7)
    kept = small(**{"stages.0.batch_size": 64, "stages.0.chunk_size": 16, "stages.0.cached_chunks": 3})
    assert parts(kept)["activations"] == pytest.approx(48 * 100 + 128 * 7)


def test_the_stage_with_the_largest_memory_counts() -> None:
    stages = [{"epochs": 1, "batch_size": size} for size in (32, 256, 64)]
    config = small(stages=stages)
    estimate = estimate_memory(config, [ONE] * 3, num_samples=9, row_bytes=0, negatives_per_pair=0)
    assert estimate.stage == 1


@pytest.mark.parametrize(("name", "states"), [("adamw", 2), ("sgd", 1), ("lars", 1), ("muon", 2)])
def test_the_state_of_each_optimizer_is_counted(name: str, states: int) -> None:
    config = small(**{"optimizer.name": name})
    module = nn.Linear(100, 50)
    made = build_optimizer(config.optimizer.name, module)
    module(torch.ones(2, 100)).sum().backward()
    made.step()
    values = [each for state in made.state.values() for each in state.values()]
    kept = sum(each.nbytes for each in values if isinstance(each, torch.Tensor) and each.numel() > 1)
    weights = sum(each.nbytes for each in module.parameters())
    assert kept <= states * weights
    assert kept > (states - 1) * weights
    assert parts(config)["optimizer"] == states * ONE.parameters


def test_averaged_weights_count_as_a_copy() -> None:
    found = parts(small(ema_decay=0.999))
    assert found["averaged weights"] == found["weights"] > 0
    assert parts(small())["averaged weights"] == 0


def test_a_momentum_encoder_counts_as_a_copy_and_a_queue_as_a_buffer_per_worker() -> None:
    moco = parts(small("moco_v2"))
    assert moco["momentum encoder"] == ONE.parameters
    assert parts(small())["momentum encoder"] == 0
    capacity, dim = small("moco_v2").negatives.capacity, small("moco_v2").projection_head.dim
    assert moco["negatives"] >= capacity * dim * 4
    assert parts(small())["negatives"] == 0


def test_shards_split_the_memory_of_the_bank() -> None:
    whole = bank_bytes(small("instance_discrimination"), 1_000)
    shared = bank_bytes(small("instance_discrimination", **{"bank.shards": 4}), 1_000)
    assert len(shared) == 4
    assert sum(shared) == sum(whole) >= 1_000 * 128 * 4
    assert bank_bytes(small(), 1_000) == []
    assert bank_bytes(small("instance_discrimination", **{"bank.location": "worker"}), 1_000) == []
    of_pairs = small("clip", **{"stages.0.loss": "gcl", "negatives.store": "partition"})
    # A second partition function in float32.
    assert sum(bank_bytes(of_pairs, 1_000)) == sum(bank_bytes(small("sogclr"), 1_000)) + 4_000
    mined = small("two_tower", **{"negatives.mined.num": 2, "bank.shards": 2})
    (shard, other) = bank_bytes(mined, 1_000, num_documents=3_000)
    assert shard == other >= 1_500 * mined.projection_head.dim * 4


@pytest.mark.parametrize(
    ("method", "remedy"),
    [
        (
            "instance_discrimination",
            "raise bank.shards, set bank.dtype=float16, or add a node with more memory",
        ),
        ("sogclr", "raise bank.shards, or add a node with more memory"),  # of one type
        ("moco_v2", "lower negatives.capacity, or add a node with more memory"),  # float16 already
    ],
)
def test_the_remedy_for_a_bank_that_is_too_large_names_only_settings_that_act(
    method: str, remedy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.doctor.memory.nodes_for_a_bank", lambda: [{"NodeID": "id"}])
    monkeypatch.setattr("raycl.doctor.memory.check_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.doctor.memory._profile_stages", lambda config: [ONE] * len(config.stages))
    node = Node(node_id="id", name="node", is_head=True, num_cpus=1, num_gpus=0, object_store=1e9)
    answers = [NodeAnswer(node, NodeInfo(versions={}, memory=1e3, free_memory=1e3))]
    config = small(method, **{"data.cache": "materialize", "bank.location": "actor"})
    source = SimpleNamespace(num_rows=1_000, columns=ColumnNames())
    data: Any = SimpleNamespace(source=source, decoded_bytes=1.0, negatives_per_pair=0.0, texts_per_row=1.0)
    found = {each.name: each for each in check_memory(config, data, answers)}
    assert not found["bank"].good
    assert found["bank"].remedy == remedy


@pytest.mark.parametrize(("cache", "num_documents"), [("materialize", 3_000), ("stream", 1_000)])
def test_each_sentence_of_a_row_is_a_document_to_mine_but_of_a_stream_the_first_one(
    cache: str, num_documents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.doctor.memory.nodes_for_a_bank", lambda: [{"NodeID": "id"}])
    monkeypatch.setattr("raycl.doctor.memory.check_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.doctor.memory.check_pools", lambda *_: [])
    monkeypatch.setattr("raycl.doctor.memory._profile_stages", lambda config: [ONE] * len(config.stages))
    node = Node(node_id="id", name="node", is_head=True, num_cpus=1, num_gpus=0, object_store=1e9)
    answers = [NodeAnswer(node, NodeInfo(versions={}, memory=1e3, free_memory=1e3))]
    config = small("simcse", **{"data.cache": cache, "negatives.mined.num": 1})
    row = SampledRow(where="", label=-1, error=None, num_characters={"text": [3, 4, 5]})
    source: Any = SimpleNamespace(num_rows=1_000, columns=ColumnNames())
    data = DataSummary(source=source, rows=[row], num_flat=0, sample_bytes=8)
    found = {each.name: each for each in check_memory(config, data, answers)}
    (num_bytes,) = bank_bytes(config, 1_000, num_documents=num_documents)
    assert f"1 shard of {format_bytes(num_bytes)}," in found["bank"].seen
    sizes: dict[str, Any] = {"num_samples": 1_000, "row_bytes": 0.0, "negatives_per_pair": 0.0}
    tables = [
        estimate_memory(config, [ONE], texts_per_row=number, **sizes).parts["negatives"]
        for number in (1.0, 3.0)
    ]
    assert tables[1] == 3 * tables[0] > 0


def test_an_elastic_run_is_estimated_with_the_workers_that_take_the_most_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu = list[MemoryEstimate]()

    def check_gpu(name: str, estimate: MemoryEstimate, nodes: object, remedy: str) -> CheckResult:
        on_gpu.append(estimate)
        return CheckResult(good=True, name=name, seen="")

    monkeypatch.setattr("raycl.doctor.memory.check_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.doctor.memory.check_pools", lambda *_: [])
    monkeypatch.setattr("raycl.doctor.memory.check_gpu", check_gpu)
    monkeypatch.setattr("raycl.doctor.memory._profile_stages", lambda config: [ONE])
    elastic = small("simclr", min_workers=2, workers=8, **{"stages.0.batch_size": 840})

    def check(num_cpus: int, free: float) -> CheckResult:
        sizes = {"a": num_cpus, "b": 8 - num_cpus}
        nodes = [
            Node(node_id=name, name=name, is_head=False, num_cpus=cpus, num_gpus=0, object_store=0)
            for name, cpus in sizes.items()
        ]
        free_on = {"a": free, "b": 1e12}
        answers = [
            NodeAnswer(node, NodeInfo(versions={}, memory=0, free_memory=free_on[node.name]))
            for node in nodes
        ]
        return next(
            each for each in check_memory(elastic, None, answers) if each.name == "memory of a worker"
        )

    # A node of three CPUs may hold a group of three workers, and a node of one CPU a worker of a group of two.
    for num_cpus, workers in ((1, 2), (3, 3), (8, 8)):
        worker = estimate_memory(
            elastic.settled(workers), [ONE], num_samples=0, row_bytes=0, negatives_per_pair=0
        )
        assert worker.parts["activations"] == 2 * 840 // workers * 100
        need = num_cpus * worker.host
        assert check(num_cpus, need).good
        found = check(num_cpus, need - 1)
        assert not found.good
        assert found.seen.startswith(f"about {format_bytes(worker.host)} ")
    elastic = elastic.model_copy(update={"gpu": True})
    list(check_memory(elastic, None, []))
    assert on_gpu[0].parts["activations"] == 840 * 100


def test_a_cluster_whose_nodes_are_all_silent_has_no_network_to_check() -> None:
    result = check_network([])
    assert (result.good, result.seen) == (True, "not checked, since no node answers")


def test_nodes_with_as_many_free_gpus_are_asked_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    free = {"a": 8.0, "b": 8.0, "c": 3.0, "d": 0.0, "e": 8.0}
    nodes = [
        Node(node_id=name, name=name, is_head=False, num_cpus=1, num_gpus=8, object_store=0)
        for name in "abcde"
    ]
    asked = list[tuple[str, float]]()

    def ask(nodes: list[Node], _: Any, *, num_gpus: float) -> list[NodeAnswer[Any]]:
        asked.append(("".join(node.name for node in nodes), num_gpus))
        models = {"a": [("H100", 2.0**30)] * 8, "b": [], "c": [("H100", 2.0**30)] * 3}
        return [NodeAnswer(node, models.get(node.name), "no answer") for node in nodes]

    resources = {name: {"GPU": number} for name, number in free.items()}
    monkeypatch.setattr("raycl.doctor.checks.state.available_resources_per_node", lambda: resources)
    monkeypatch.setattr("raycl.doctor.checks.ask_nodes", ask)
    found = {each.name[-1]: each for each in check_gpus(nodes)}
    assert asked == [("abe", 8), ("c", 3)]
    assert [name for name in "abcde" if found[name].good] == ["a", "c", "d"]
    assert found["c"].seen.startswith("Ray counts 3 free of 8, torch sees 3 (H100 1.0 GiB, ")
    assert found["d"].seen == "8, all in use now, so not checked"
    assert found["e"].seen == "Ray counts 8; no answer"
    (none,) = check_gpus([replace(nodes[0], num_gpus=0)])
    assert (none.name, none.good) == ("GPUs", True)


def test_only_nodes_with_the_required_type_of_gpu_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = {"old": ("T4", 2.0**30), "new": ("H100", 80 * 2.0**30)}
    listed = [
        {
            "NodeID": name,
            "Alive": True,
            "NodeManagerHostname": name,
            "Resources": {"CPU": 8.0, "GPU": 1.0, f"accelerator_type:{kind}": 1.0},
            "Labels": {},
        }
        for name, (kind, _) in gpu.items()
    ]
    monkeypatch.setattr("raycl.doctor.nodes.ray.nodes", lambda: listed)
    nodes = sorted(alive_nodes(), key=lambda node: node.name, reverse=True)
    infos = (NodeInfo(versions={}, memory=free, free_memory=free) for free in (1e3, 1e12))
    answers = [NodeAnswer(*each) for each in zip(nodes, infos, strict=True)]
    monkeypatch.setattr("raycl.doctor.memory.check_cluster", lambda *_, **__: None)
    monkeypatch.setattr("raycl.doctor.memory._profile_stages", lambda config: [ONE] * len(config.stages))
    monkeypatch.setattr(
        "raycl.doctor.estimate.ask_nodes",
        lambda nodes, _, num_gpus: [NodeAnswer(each, [gpu[each.name]]) for each in nodes],
    )

    def check(**settings: Any) -> dict[str, CheckResult]:
        config = small("simclr", gpu=True, **settings)
        return {each.name: each for each in check_memory(config, None, answers)}

    found = check(accelerator="H100")
    assert found["memory of a worker"].good and "1 on new" in found["memory of a worker"].seen
    assert found["memory of a GPU"].good and "the smallest has 80.0 GiB" in found["memory of a GPU"].seen
    found = check()
    assert not found["memory of a worker"].good and "1 on old" in found["memory of a worker"].seen
    assert not found["memory of a GPU"].good and "the smallest has 1.0 GiB" in found["memory of a GPU"].seen


KEYS: dict[str, Any] = {
    "momentum_encoder.location": "actors",
    "momentum_encoder.actors": 3,
    "stages.0.batch_size": 64,
}
ENCODING = replace(ONE, encoded=(20.0,))


def test_a_key_encoder_holds_its_weights_twice_and_the_rows_of_a_request_without_a_graph() -> None:
    found = estimate_encoder(small("moco_v2", **KEYS), "momentum_encoder", [ENCODING]).parts
    assert found == {"process": 1e6, "weights": 8e3, "activations": 64 * 20, "views": 64 * 10}
    two = small("moco_v2", **KEYS, workers=2)
    assert estimate_encoder(two, "momentum_encoder", [ENCODING]).parts["activations"] == 32 * 20
    chunked = small("moco_v2", **KEYS, **{"stages.0.chunk_size": 16})
    found = estimate_encoder(chunked, "momentum_encoder", [ENCODING]).parts
    assert (found["activations"], found["views"]) == (16 * 20, 64 * 10)
    both_views = small("moco_v3", **KEYS)
    assert estimate_encoder(both_views, "momentum_encoder", [ENCODING]).parts["views"] == 128 * 10


def test_an_encoder_of_a_miner_embeds_the_longer_side_in_batches() -> None:
    config = small("two_tower", **{"negatives.mined.num": 2, "stages.0.batch_size": 8})
    measured = replace(TWO, encoded=(3.0, 5.0), inputs=(7.0, 9.0))
    found = estimate_encoder(config, "negatives.mined", [measured])
    assert (found.parts["activations"], found.parts["views"]) == (256 * 5, 256 * 9)
    assert found.host == found.total
    on_gpu = override(config, {"negatives.mined.gpus_per_actor": 0.5})
    found = estimate_encoder(on_gpu, "negatives.mined", [replace(measured, process=30.0)])
    assert found.host == ALLOCATOR * 30


def estimate_of(config: RunConfig, workers: int) -> MemoryEstimate:
    profiles = [ENCODING] * len(config.stages)
    return estimate_memory(
        config.settled(workers), profiles, num_samples=9, row_bytes=0, negatives_per_pair=0
    )


@pytest.fixture
def checked_pools(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that checks the pools of a recipe on two nodes, the second one labeled."""

    def check(config: RunConfig, *, free: float, cpus: float = 8.0, gpu: float = 0.0) -> list[CheckResult]:
        nodes = [
            Node(node_id=name, name=name, is_head=name == "a", num_cpus=cpus, num_gpus=2 * bool(gpu), object_store=0)
            for name in "ab"
        ]  # fmt: skip
        info = NodeInfo(versions={}, memory=0.0, free_memory=free)
        labels = [
            {"NodeID": "a", "Alive": True, "Labels": {}},
            {"NodeID": "b", "Alive": True, "Labels": {"zone": "b"}},
        ]
        monkeypatch.setattr("raycl.training.pools.ray.nodes", lambda: labels)
        memory = [("H100", gpu)] if gpu else None
        monkeypatch.setattr(
            "raycl.doctor.estimate.ask_nodes",
            lambda nodes, _, num_gpus: [NodeAnswer(node, memory) for node in nodes],
        )
        profiles = [ENCODING] * len(config.stages)
        answers = [NodeAnswer(node, info) for node in nodes]
        return list(check_pools(config, profiles, partial(estimate_of, config), answers))

    return check


def test_the_encoders_of_a_node_count_beside_its_workers(checked_pools: Any) -> None:
    config = small("moco_v2", **KEYS, gpu=False, workers=2)
    worker = estimate_memory(config, [ENCODING], num_samples=9, row_bytes=0, negatives_per_pair=0).host
    encoder = estimate_encoder(config, "momentum_encoder", [ENCODING]).host
    need = 2 * worker + 3 * encoder
    (enough,), (less,) = (checked_pools(config, free=each) for each in (need, need - 1))
    assert (enough.good, less.good) == (True, False)
    assert "3 beside 2 workers on a" in less.seen
    assert less.remedy.startswith("lower momentum_encoder.actors")
    # A node of three CPUs has room for one encoder beside its two workers.
    (fits,) = checked_pools(config, free=2 * worker + encoder, cpus=3.0)
    assert fits.good and "1 beside 2 workers" in fits.seen
    elsewhere = override(config, {"momentum_encoder.node_label": "zone=b"})
    (labeled,) = checked_pools(elsewhere, free=need - 1)
    assert "on b" in labeled.seen
    (none,) = checked_pools(override(config, {"momentum_encoder.node_label": "zone=c"}), free=0.0)
    assert none.good and "no node can hold one now" in none.seen
    assert checked_pools(small("moco_v2", gpu=False), free=0.0) == []


def test_an_encoder_has_the_keys_of_the_smallest_group(checked_pools: Any) -> None:
    elastic = {"min_workers": 1, "workers": 2, "batchnorm_groups": 2}
    config = small("moco_v2", **KEYS, **elastic, gpu=False)
    encoder = estimate_encoder(config.settled(1), "momentum_encoder", [ENCODING])
    assert encoder.parts["activations"] == 64 * 20
    need = 2 * estimate_of(config, 2).host + 3 * encoder.host
    (enough,), (less,) = (checked_pools(config, free=each) for each in (need, need - 1))
    assert (enough.good, less.good) == (True, False)


def test_an_encoder_must_fit_its_share_of_a_gpu(checked_pools: Any) -> None:
    config = small("moco_v2", **KEYS, gpu=False, **{"momentum_encoder.gpus_per_actor": 0.5})
    need = estimate_encoder(config, "momentum_encoder", [ENCODING]).gpu + CUDA_BYTES
    for gpu, good in ((2 * need, True), (2 * need - 2, False)):
        _, found = checked_pools(config, free=1e12, gpu=gpu)
        assert found.good == good
        assert "0.5 of the smallest" in found.seen
    assert found.remedy == "raise momentum_encoder.gpus_per_actor"
    whole = override(config, {"momentum_encoder.gpus_per_actor": 2})
    assert checked_pools(whole, free=1e12, gpu=need)[1].good


def test_explicit_negatives_count_as_rows_of_the_key_tower() -> None:
    config = small("two_tower", **{"stages.0.batch_size": 8})
    assert parts(config, TWO)["activations"] == 8 * 100 + 8 * 10
    assert parts(config, TWO, negatives=3.0)["activations"] == 8 * 100 + 8 * 4 * 10
    without = override(config, {"negatives.explicit": False})
    assert parts(without, TWO, negatives=3.0)["activations"] == 8 * 100 + 8 * 10


def test_gpu_memory_excludes_the_process_and_prefetched_rows() -> None:
    on_cpu, on_gpu = (
        estimate_memory(small(gpu=gpu), [ONE], num_samples=9, row_bytes=50, negatives_per_pair=0)
        for gpu in (False, True)
    )
    assert on_cpu.gpu == 0
    drawing = ALLOCATOR * (2 * 256 * 50 + 40 * 256 * 50 / 3)
    assert on_cpu.host == on_cpu.total == pytest.approx(on_gpu.total - drawing)
    assert on_gpu.host == pytest.approx(ALLOCATOR * (1e6 + 4 * 256 * 50))


@pytest.mark.parametrize(
    ("name", "measured", "message"),
    [
        ("simclr", ONE, "stages.0.chunk_size"),
        ("simclr gpu=true", ONE, "lower --batch-size, use more nodes, or take nodes with more memory"),
        ("moco_v2 gpu=true", ONE, "lower --batch-size, use more nodes"),
        ("moco_v2", ONE, "lower negatives.capacity"),
        ("sogclr", ONE, "nodes with more memory, since each worker has the ids"),
        ("sogclr bank.location=worker", ONE, "set bank.location=actor"),
        ("two_tower negatives.mined.num=1 stages.0.batch_size=2", TWO, "lower negatives.mined.candidates"),
        ("simclr", replace(ONE, parameters=1e9), "smaller encoder"),
    ],
)
def test_the_remedy_reduces_the_largest_part(name: str, measured: MemoryProfile, message: str) -> None:
    method, *settings = name.split()
    config = override(recipe(method, image_size=32), settings)
    estimate = estimate_memory(config, [measured], num_samples=10**6, row_bytes=0, negatives_per_pair=0)
    assert message in estimate.remedy(config, on_gpu=False)


def test_the_parts_and_the_remedy_are_of_the_memory_that_is_short() -> None:
    config = override(recipe("moco_v2", image_size=32), {"gpu": True})
    estimate = estimate_memory(config, [ONE], num_samples=10**6, row_bytes=2**14, negatives_per_pair=0)
    on_node, on_gpu = estimate.describe(on_gpu=False), estimate.describe(on_gpu=True)
    assert ("waiting rows" in on_node, "negatives" in on_node) == (True, False)
    assert ("waiting rows" in on_gpu, "negatives" in on_gpu) == (False, True)
    assert estimate.remedy(config, on_gpu=True).startswith("lower negatives.capacity")
    config = override(recipe("simclr", image_size=32), {"gpu": True})
    measured = [replace(ONE, parameters=1e9)]
    large = estimate_memory(config, measured, num_samples=9, row_bytes=0, negatives_per_pair=0)
    assert large.remedy(config, on_gpu=True) == "take a smaller encoder, or GPUs with more memory"


def test_the_peak_of_a_call_is_measured() -> None:
    def call() -> None:
        first = torch.empty(250_000)
        del first
        second, third = torch.empty(500_000), torch.empty(250_000)
        del second, third

    assert peak_bytes(call) == pytest.approx(3e6, rel=0.01)


def test_memory_per_row_is_measured_with_and_without_chunks() -> None:
    settings = {
        "encoder.name": "resnet10",
        "encoder.width": 0.25,
        "data.image_size": 16,
        "batchnorm": "group",
    }
    config = small(**settings)
    whole = profile_memory(config, config.stages[0], None)
    towers = build_towers(config)
    assert whole.parameters == sum(each.nbytes for each in towers.parameters())
    assert whole.inputs == (3 * 16 * 16 * 4,)
    assert whole.waiting == (0.0,)
    larger = profile_memory(override(config, {"data.image_size": 32}), config.stages[0], None)
    assert larger.activations[0] > 3 * whole.activations[0] > 0  # four times the pixels
    in_stage = override(config, {"data.image_size": 32, "stages.0.image_size": 16})
    assert profile_memory(in_stage, in_stage.stages[0], None).inputs == whole.inputs
    chunked = override(config, {"stages.0.chunk_size": 8})
    in_chunks = profile_memory(chunked, chunked.stages[0], None)
    # Without batch statistics, only embeddings and their gradients are stored.
    assert in_chunks.waiting[0] < 0.2 * whole.activations[0]


def test_a_row_that_is_only_encoded_needs_the_largest_pair_of_layers_and_is_measured_for_pools_only() -> None:
    settings = {"encoder.name": "resnet18", "encoder.stem": "half", "stages.0.batch_size": 64, "gpu": False}
    config = small("moco_v2", **settings)
    assert profile_memory(config, config.stages[0], None).encoded == ()
    profile = profile_memory(override(config, KEYS), config.stages[0], None)
    towers = build_towers(config)
    rows = torch.randn(64, 3, 32, 32)
    with torch.no_grad():
        expected = peak_bytes(lambda: towers(rows)) / 64
    assert profile.encoded[0] == pytest.approx(expected, rel=0.3)
    assert profile.encoded[0] < 0.5 * profile.activations[0]


def test_views_of_each_size_count_with_their_own_memory() -> None:
    views = [{"count": 3}, {"count": 4, "size": 16}]
    config = small(**{"encoder.name": "resnet10", "encoder.width": 0.25, "augment.views": views})
    profile = profile_memory(config, config.stages[0], None)
    assert profile.inputs == (3 * 32 * 32 * 4, 3 * 16 * 16 * 4)
    assert profile.activations[0] > 3 * profile.activations[1] > 0
    estimate = estimate_memory(config, [profile], num_samples=100, row_bytes=0.0, negatives_per_pair=0.0)
    samples = config.stages[0].batch_size
    assert estimate.parts["views"] == samples * (3 * profile.inputs[0] + 4 * profile.inputs[1])


def test_a_prediction_head_counts_except_in_the_momentum_encoder() -> None:
    settings = {"encoder.width": 0.25, "projection_head.hidden_dim": 64, "prediction_head.hidden_dim": 512}
    config = small("moco_v3", **settings)
    profile = profile_memory(config, config.stages[0], None)
    assert profile.prediction_head == 4 * (256 * 512 + 2 * 512 + 512 * 256 + 256)
    found, without = (
        parts(config, each) for each in (profile, replace(profile, prediction_head=0.0, predictions=0.0))
    )
    for name, copies in {"weights": 1, "gradients": 1, "optimizer": 2, "momentum encoder": 0}.items():
        assert found[name] - without[name] == copies * profile.prediction_head, name
    views = 2 * config.stages[0].batch_size
    assert found["activations"] - without["activations"] == pytest.approx(views * profile.predictions)
    assert profile.predictions > 3 * 4 * 512  # the hidden layer, normalized, and after the ReLU


def test_an_untrained_vocabulary_counts_at_its_full_size() -> None:
    arguments = {"dim": 16, "hidden_dim": 0}
    sizes = {}
    for size_ in (1_000, 2_000):
        config = small(
            "two_tower", **{
                "text.vocabulary_size": size_, "encoder.kwargs": arguments, "projection_head.dim": 16,
                "text.max_document_length": 8, "text.max_length": 8,
            }
        )  # fmt: skip
        sizes[size_] = profile_memory(config, config.stages[0], None).parameters
    assert sizes[2_000] - sizes[1_000] >= 1_000 * 16 * 4


def test_a_recipe_is_planned_like_in_train(tmp_path: Path) -> None:
    data = str(write_digits(tmp_path / "digits.parquet", 20))
    assert plan("simclr", {}, data, []).data.image_size == 16
    assert plan("simclr", {}, None, []).data.image_size == 224
    assert plan("simclr", {}, None, ["data.image_size=48"]).data.image_size == 48
    # The data check reports invalid data.
    assert plan("simclr", {}, str(tmp_path / "none"), []).data.image_size == 224
    assert plan("simcse", {"workers": 2}, None, []).workers == 2


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        ({"text": ["a"]}, "texts"),
        ({"query": ["a"], "document": ["b"]}, "pairs"),
        ({"image": [b"a"], "caption": ["b"]}, "images with captions"),
        ({"image": [b"a"]}, "images"),
    ],
)
def test_the_kind_of_data_is_found_also_if_only_the_label_is_named(
    content: dict[str, list[Any]], kind: str, tmp_path: Path
) -> None:
    pq.write_table(pa.table({**content, "topic": [1]}), tmp_path / "a.parquet")
    columns = command_settings("doctor", ["data.columns.label=topic"])["columns"]
    result = next(check_data(str(tmp_path / "a.parquet"), columns, None))
    assert result.seen.startswith(f"1 rows with labels, {kind}, parquet in 1 fragment")


def use_sample(monkeypatch: pytest.MonkeyPatch, rows: list[SampledRow]) -> None:
    """Replace the tasks that read a sample."""

    def read(source: Any, config: RunConfig) -> DataSummary:
        return DataSummary(source=source, rows=rows, num_flat=0, sample_bytes=0)

    monkeypatch.setattr("raycl.doctor.data._read_sample", read)


def test_rows_that_a_run_would_refuse_are_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    use_sample(monkeypatch, [SampledRow(where="", label=-1, error=None)])
    pq.write_table(pa.table({"image": [b"x"] * 3}), tmp_path / "a.parquet")
    uri = str(tmp_path / "a.parquet")
    _, labels, _, batch = check_data(uri, None, recipe("supcon", image_size=32))
    assert not batch.good
    assert batch.seen.startswith("a batch of 256 rows (stages.0.batch_size) is larger than the 3 rows")
    assert not labels.good
    assert labels.seen.startswith(
        "loss supcon needs labels, but the samples have none; put images in a folder"
    )


@pytest.mark.parametrize(
    ("name", "every_epochs", "num_rows", "labeled", "sample", "num_train"),
    [
        ("two_tower", 1, 1_000, True, "+---------", 90),
        ("two_tower", 0, 1_000, True, "+---------", 100),
        ("two_tower", 0, 1_000, True, "+--", None),
        ("simclr", 1, 270, True, "..", 243),
        ("simclr", 1, 290, True, "..", None),
        ("simclr", 1, 270, False, "..", None),
        ("simclr", 0, 270, True, "..", None),
        ("simclr", 0, 270, True, ".........x", 243),
    ],
)
def test_a_batch_is_compared_with_the_rows_that_a_run_trains_on(
    name: str,
    every_epochs: int,
    num_rows: int,
    labeled: bool,
    sample: str,
    num_train: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clicks = {"+": True, "-": False}
    rows = [
        SampledRow(where="", label=0, error="invalid" if each == "x" else None, is_click=clicks.get(each))
        for each in sample
    ]
    use_sample(monkeypatch, rows)
    contents = {"image": [b"x"]} if name == "simclr" else {"query": ["a"], "document": ["b"]}
    columns = {**contents, "label": [0]} if labeled else contents
    table = pa.table({column: values * num_rows for column, values in columns.items()})
    pq.write_table(table, tmp_path / "a.parquet")
    sizes = {"stages.0.batch_size": 256, "evaluation.every_epochs": every_epochs}
    found = check_data(str(tmp_path / "a.parquet"), None, override(recipe(name, image_size=32), sizes))
    batch = [each.seen for each in found if each.name == "batch size"]
    assert len(batch) == (num_train is not None)
    assert all(f"is larger than the {num_train} rows to train on" in seen for seen in batch)


def test_a_column_label_of_other_values_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"] * 300, "label": [0.5] * 300}), tmp_path / "a.parquet")
    uri = str(tmp_path / "a.parquet")
    data, labels, _ = itertools.islice(check_data(uri, None, recipe("simclr", image_size=32)), 3)
    assert data.seen.startswith("300 rows without labels")
    assert labels.good
    assert labels.seen == "ignored: column 'label' holds double, not integers or text"
    _, needed, _ = itertools.islice(check_data(uri, None, recipe("supcon", image_size=32)), 3)
    assert not needed.good
    assert needed.seen.startswith("loss supcon needs labels, but column 'label' holds double; put images in")


def test_the_data_set_of_a_mixture_is_checked_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"image": [b"x"] * 300}), tmp_path / "a.parquet")
    mixture = override(recipe("simclr", image_size=32), {"data.weights": [2.0, 1.0]})
    first, second = itertools.islice(check_data(str(tmp_path / "a.parquet"), None, mixture), 2)
    assert (first.name, first.good) == ("data", True)
    assert second.name == "sample"


def test_short_texts_are_streamed_if_a_run_streams_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pq.write_table(pa.table({"query": ["a"] * 100, "document": ["b"] * 100}), tmp_path / "a.parquet")
    config = override(recipe("two_tower"), {"text.max_length": 8, "text.max_document_length": 24})
    source = find_source(str(tmp_path / "a.parquet"), column_names(config))
    data = DataSummary(source=source, rows=[], num_flat=0, sample_bytes=0)
    # A run counts every text at its greatest length: 100 rows of 32 tokens.
    for store, streamed in ((2 * 100 * 32 * 4 - 2, True), (2 * 100 * 32 * 4, False)):
        monkeypatch.setattr("raycl.training.data_module.object_store_bytes", lambda size=store: float(size))
        assert is_streamed(config, data) == streamed
    corrected = override(config, {"stages.0.logq_correction": "simple"})
    assert check_decoded_data(corrected, data, []).seen.startswith(
        "100 decoded rows take 0 B, held in object stores"
    )
    cached = override(config, {"data.cache": "stream"})
    assert check_decoded_data(cached, data, []).good
    refused = check_decoded_data(override(corrected, {"data.cache": "stream"}), data, [])
    assert not refused.good
    assert "they are streamed: logq_correction needs the ids of all rows before training" in refused.seen
    assert (is_streamed(config, None), is_streamed(cached, None), is_streamed(cached, data)) == (
        False,
        True,
        True,
    )


def test_splits_in_place_of_classes_are_red(tmp_path: Path) -> None:
    for name in ("train/a.png", "val/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"x")
    config = override(recipe("simclr", image_size=32), {"stages.0.batch_size": 2})
    _, labels = itertools.islice(check_data(str(tmp_path), None, config), 2)
    assert not labels.good
    assert "holds a data set in 2 splits; give --data" in labels.seen


def test_a_missing_corpus_is_red(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a b", "b c"]}), tmp_path / "a.parquet")
    config = override(recipe("simcse"), {"text.corpus": str(tmp_path / "b"), "stages.0.batch_size": 2})
    _, corpus = itertools.islice(check_data(str(tmp_path / "a.parquet"), None, config), 2)
    assert (corpus.name, corpus.good) == ("text.corpus", False)
    assert "there is nothing at" in corpus.seen


def test_an_invalid_recipe_is_refused_immediately() -> None:
    with pytest.raises(ConfigError, match="nonsense"):
        plan("nonsense", {}, None, [])
    with pytest.raises(StorageError):
        plan("/nowhere/mine.yaml", {}, None, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", 2], "give one, for example raycl doctor simclr"),
        (["simclr", "--workers", "many"], "--workers takes a positive number"),
        (["simclr", "--set", "nonsense=1"], "unknown key nonsense"),
        (["nonsense"], "nonsense"),
    ],
)
def test_an_invalid_request_is_refused_in_one_line_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    status, out, err = run_raycl(monkeypatch, capsys, "doctor", *arguments)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize("number", [1, 7, 8, 15, 23, 1_000])
def test_the_sample_is_spread_over_all_fragments(number: int) -> None:
    fragments = [Fragment(uri="a", first_id=place, stop=place + 1) for place in range(number)]
    places = [each.first_id for each in spread(fragments)]
    assert len(places) == len(set(places)) == min(number, MAX_FRAGMENTS)
    assert (places[0], places[-1]) == (0, number - 1)
    steps = np.diff(places)
    assert not len(steps) or steps.max() - steps.min() <= 1
