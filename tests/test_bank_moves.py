"""Shards of a bank leave nodes that will be removed, and lose no row, without Ray."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from raycl.errors import ShardAwayError
from raycl.negatives import MemoryBank
from raycl.negatives.bank import Bank
from raycl.negatives.client import MemoryBankClient, QueueClient
from raycl.negatives.placement import ShardAtRisk, reserved_memory, shards_at_risk
from raycl.training.checkpoint import Checkpointer
from raycl.training.stages import Position
from tests.test_bank_faults import (
    DIM,
    IDS,
    Cluster,
    FakeActor,
    a_batch,
    a_spec,
    rows_of,
    state_of,
    without_ray,
)

__all__ = ["without_ray"]  # a fixture that every test uses


def shards_that_fit(free: list[int], need: int) -> int:
    return sum(each // need for each in free)


@given(
    st.lists(st.sampled_from("abcd"), min_size=1, max_size=9),
    st.sets(st.sampled_from("abcd")),
    st.lists(st.integers(0, 40), min_size=4, max_size=4),
    st.integers(1, 12),
)
def test_as_many_shards_of_drained_nodes_move_as_have_room_on_the_others(
    nodes: list[str], draining: set[str], free: list[int], need: int
) -> None:
    by_node = dict(zip("abcd", map(float, free), strict=True))
    found = shards_at_risk(nodes, [need] * len(nodes), draining, by_node)
    assert [each.shard for each in found] == [n for n, node in enumerate(nodes) if node in draining]
    assert all(each.node_id == nodes[each.shard] for each in found)
    others = [each for node, each in zip("abcd", free, strict=True) if node not in draining]
    assert sum(each.has_room for each in found) == min(len(found), shards_that_fit(others, need))


def test_a_shard_that_exactly_fits_moves_and_no_node_for_a_bank_is_no_room() -> None:
    assert shards_at_risk(["a"], [5], {"a"}, {"a": 9.0, "b": 5.0}) == [ShardAtRisk(0, "a", True)]
    assert shards_at_risk(["a"], [5], {"a"}, {"b": 4.9}) == [ShardAtRisk(0, "a", False)]
    assert shards_at_risk(["a"], [5], {"a"}, {}) == [ShardAtRisk(0, "a", False)]
    assert shards_at_risk(["", "b"], [5, 5], {"a"}, {"c": 99.0}) == []


class FakeRay:
    """The nodes of a cluster, and where Ray restarts a killed actor: on a node that is not drained."""

    def __init__(self, actors: list[FakeActor], nodes: dict[str, float]) -> None:
        self.nodes, self.draining = nodes, set[str]()
        self.facts = {
            id(each): {"State": "ALIVE", "NumRestarts": 0, "Address": {"NodeID": "a"}} for each in actors
        }
        self.num_polls = 0
        self._polls_left: dict[int, int] = {}  # until Ray notices the death of an actor

    def kill(self, actor: FakeActor, *, no_restart: bool = True) -> None:
        assert not no_restart, "the actor must come back"
        actor.die()
        self._polls_left[id(actor)] = 2

    def facts_of(self, actor: FakeActor) -> dict[str, Any]:
        self.num_polls += 1
        found, left = self.facts[id(actor)], self._polls_left.pop(id(actor), None)
        if left:
            self._polls_left[id(actor)] = left - 1
        elif left == 0:
            found["NumRestarts"] += 1
            found["Address"] = {"NodeID": next(each for each in self.nodes if each not in self.draining)}
        return found


@pytest.fixture
def ray_of(monkeypatch: pytest.MonkeyPatch) -> Any:
    def install(bank: Bank, nodes: dict[str, float]) -> FakeRay:
        fake = FakeRay(bank.actors, nodes)
        monkeypatch.setattr("raycl.negatives.bank.ray", fake)
        monkeypatch.setattr("raycl.negatives.bank.actor_facts", fake.facts_of)
        monkeypatch.setattr("raycl.negatives.bank.draining_nodes", lambda: fake.draining)
        monkeypatch.setattr("raycl.negatives.bank.free_memory", lambda: fake.nodes)
        monkeypatch.setattr("raycl.negatives.bank._POLL_S", 0.0)
        return fake

    return install


def test_a_memory_bank_that_moves_after_its_snapshot_equals_one_that_stays(
    tmp_path: Path, ray_of: Any
) -> None:
    cluster, bank = Cluster(a_spec("memory_bank", tmp_path, num_shards=3)), MemoryBank(IDS, DIM, seed=0)
    fake = ray_of(cluster.bank, {"a": 0.0, "b": 1e9})
    client = MemoryBankClient(cluster.bank, IDS)
    deaths: list[int] = []
    for actor in cluster.actors:
        actor.on_death = lambda dead: deaths.append(dead.shard)
    for step in range(6):
        rows, choice = a_batch(3, step)
        for each in (client, bank):
            each.update(IDS[choice % 7], rows, step)
        if step % 2:
            client.save(step)
            cluster.bank.move([step % 3])
        asked = np.arange(len(IDS))
        client.ask(asked)
        assert client.answer().rows.tolist() == bank.read(asked).rows.tolist()
    assert deaths == [1, 0, 2]
    assert client.restarts == 3
    assert fake.facts[id(cluster.actors[0])]["NumRestarts"] == 1
    assert rows_of(cluster.bank.negatives()) == rows_of(bank.negatives())


def test_a_queue_that_moves_keeps_all_rows(tmp_path: Path, ray_of: Any) -> None:
    cluster = Cluster(a_spec("queue", tmp_path))
    ray_of(cluster.bank, {"b": 1e9})
    client = QueueClient(cluster.bank)
    for step in range(5):
        client.push(*a_batch(7, step), step)
        if step == 2:
            client.save(step)
            cluster.bank.move([0])
    client.flush()
    assert state_of(cluster.bank.read_queue()) == state_of(client.queue)


def test_a_move_ends_when_ray_has_restarted_the_shard_and_not_before(tmp_path: Path, ray_of: Any) -> None:
    cluster = Cluster(a_spec("queue", tmp_path))
    fake = ray_of(cluster.bank, {"b": 1e9})
    asked: list[int] = []
    cluster.actors[0].on_call = lambda *_: asked.append(fake.facts[id(cluster.actors[0])]["NumRestarts"])
    cluster.bank.move([0])
    assert asked == [1]


def test_only_shards_on_drained_nodes_are_at_risk(tmp_path: Path, ray_of: Any) -> None:
    cluster = Cluster(a_spec("memory_bank", tmp_path, num_shards=2))
    need = max(reserved_memory(cluster.bank.spec))
    fake = ray_of(cluster.bank, {"a": 1e9, "b": float(need)})
    assert cluster.bank.at_risk() == []
    assert fake.num_polls == 0, "without a drained node, Ray is asked nothing about the shards"
    fake.draining = {"a"}
    assert cluster.bank.at_risk() == [ShardAtRisk(0, "a", True), ShardAtRisk(1, "a", False)]
    fake.facts[id(cluster.actors[0])]["State"] = "RESTARTING"
    assert cluster.bank.at_risk() == [ShardAtRisk(1, "a", True)]


# ---- checkpoints


@dataclass
class FakeBank:
    """A bank whose shards are at risk, and the order of what happens to it."""

    spec: Any
    risks: list[ShardAtRisk] = field(default_factory=list)
    events: list[Any] = field(default_factory=list)

    def at_risk(self) -> list[ShardAtRisk]:
        return self.risks

    def move(self, shards: list[int]) -> None:
        self.events.append(("move", shards))
        self.risks = [each for each in self.risks if each.shard not in shards]

    def prune(self, steps: list[int]) -> None:
        self.events.append("prune")


@pytest.fixture
def saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """Yield a checkpointer with a bank of two shards, its notices and its events; no checkpoint is late."""
    bank, notices = FakeBank(a_spec("memory_bank", tmp_path, num_shards=2)), list[str]()
    coordinator = SimpleNamespace(add_notice=SimpleNamespace(remote=notices.append))
    checkpoints = SimpleNamespace(every_steps=None, interval_s=1e9)
    config = SimpleNamespace(checkpoints=checkpoints)
    job: Any = SimpleNamespace(bank=bank, coordinator=coordinator, config=config, output=tmp_path)
    monkeypatch.setattr("ray.train.get_preemption_info", lambda: None)
    monkeypatch.setattr("raycl.training.checkpoint.saved_steps", lambda _: set[int]())
    monkeypatch.setattr("raycl.training.checkpoint.wait_for_all", lambda _: bank.events.append("wait"))
    nothing: Any = None
    checkpointer = Checkpointer(
        job, nothing, nothing, nothing, nothing, Position(), mined=None, device=torch.device("cpu")
    )
    store = SimpleNamespace(save=lambda step: bank.events.append(("save", step)))
    yield SimpleNamespace(
        bank=bank,
        notices=notices,
        checkpointer=checkpointer,
        is_due=lambda: checkpointer.is_due(Position(step=4), check=True),
        writes=lambda does: setattr(checkpointer, "_is_writer", does),
        save=lambda: checkpointer._save_bank(Position(step=4), store),  # pyright: ignore[reportArgumentType]
    )


def test_a_shard_moves_after_its_snapshot_and_before_any_worker_continues(saving: SimpleNamespace) -> None:
    assert not saving.is_due()
    saving.bank.risks = [ShardAtRisk(1, "0123456789", True)]
    assert saving.is_due()
    saving.save()
    events = saving.bank.events
    assert events.index(("save", 4)) < events.index(("move", [1])) < events.index("wait") == len(events) - 1
    assert saving.notices == [
        "the bank's shard 'bank/1' moved away from node 01234567, which will be removed"
    ]
    assert not saving.is_due()


def test_a_shard_whose_room_another_run_took_restarts_the_workers(
    saving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def move(_: list[int]) -> None:
        raise ShardAwayError("the bank's shard 'bank/1' did not answer 'info'")

    monkeypatch.setattr(saving.bank, "move", move)
    saving.bank.risks = [ShardAtRisk(1, "0123456789", True)]
    with pytest.raises(ShardAwayError, match="bank/1"):
        saving.save()


def test_a_shard_without_another_node_is_saved_and_reported_once_and_moves_when_there_is_one(
    saving: SimpleNamespace,
) -> None:
    saving.bank.risks = [ShardAtRisk(0, "0123456789", False)]
    assert [saving.is_due(), saving.is_due()] == [True, False]
    saving.save()
    assert ("move", [0]) not in saving.bank.events
    (notice,) = saving.notices
    assert "'bank/0' finds no other node with" in notice and "add one" in notice
    saving.bank.risks = [ShardAtRisk(0, "0123456789", True)]
    assert saving.is_due()
    saving.save()
    assert ("move", [0]) in saving.bank.events


def test_the_first_worker_asks_for_a_check_once_a_second_however_long_steps_take(
    saving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    start = time.monotonic()
    saving.bank.risks = [ShardAtRisk(0, "0123456789", True)]
    asked, due = list[int](), list[int]()
    for step, seconds in enumerate([0.4, 0.9, 1.4, 1.9, 2.5, 30.0, 60.0]):
        monkeypatch.setattr("time.monotonic", lambda seconds=seconds: start + seconds)
        if check := saving.checkpointer.wants_check():
            asked.append(step)
        if saving.checkpointer.is_due(Position(step=step), check=check):
            due.append(step)
    assert (asked, due) == ([2, 4, 5, 6], [2])
    saving.writes(False)
    monkeypatch.setattr("time.monotonic", lambda: start + 90.0)
    assert not saving.checkpointer.wants_check()


def test_only_the_worker_that_writes_asks_about_the_bank(
    saving: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    saving.bank.risks = [ShardAtRisk(0, "a", True)]
    saving.writes(False)
    assert not saving.is_due()
    saving.save()
    assert saving.bank.events == [("save", 4), "wait"]
