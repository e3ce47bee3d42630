"""All GPU code on a pretend GPU: devices never mix, waits are few, and values equal the CPU's."""

import json
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from raycl.batchnorm import synchronize, synchronized
from raycl.batchnorm.synchronized import _device_moments
from raycl.config.overrides import override
from raycl.data.in_memory import Batch
from raycl.distributed.device_copy import StateDownload
from raycl.evaluation.embed import ROWS_AHEAD, embed
from raycl.evaluation.knn import nearest
from raycl.models.build import complete_spec, encoder_specs
from raycl.models.encoder_io import ImageEncoder, TextEncoder
from raycl.storage import Place
from raycl.tokenization import Vocabulary
from raycl.training.evaluators import KnnEvaluator, RetrievalEvaluator, SnapshotWriter
from raycl.training.key_encoders import KeyClient
from raycl.training.stores import bank_spec, build_store
from tests.pretend_gpu import CPU, CUDA, is_on_device
from tests.pretended_steps import (
    CASES,
    NUM_SAMPLES,
    PARTS,
    Worker,
    batch,
    configuration,
    count,
    pretended,
    steps_on,
    table,
)
from tests.shards import bank_in_process

# Written by `python -m tests.pretended_steps --json`; other versions of torch may launch other kernels.
COUNTS = json.loads((Path(__file__).parent / "pretended_counts.json").read_text())
COUNTED_WITH = "2.15"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_and_launches_no_more_than_recorded(name: str, workers: int) -> None:
    found = count(CASES[name], workers)
    for part in PARTS:
        waits, pageable, launches = getattr(found, part).counts
        most = COUNTS[f"{name}|{workers}"][part]
        assert waits <= most[0], (part, getattr(found, part).waits)
        assert pageable <= most[1], (part, getattr(found, part).pageable)
        if torch.__version__.startswith(COUNTED_WITH):
            assert launches <= most[2], (part, getattr(found, part).launches)
    if workers == 1:
        losses, updates = steps_on(CPU, CASES[name])
        low = "bfloat16" in name
        assert found.losses == pytest.approx(losses, rel=1e-2 if low else 1e-4)
        # Compare whole updates: AdamW moves single weights equally far even for gradients of rounding size.
        # Batch normalization of tiny maps multiplies the rounding of one step by up to 200 in the next.
        for came, expected, error in zip(found.updates, updates, (1e-3, 0.05, 0.05), strict=True):
            assert (came - expected).norm() < (0.3 if low else error) * expected.norm()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_bank_in_actors_adds_no_wait_once_its_rows_are_prefetched(tmp_path: Path, workers: int) -> None:
    case = CASES["instance_discrimination"]
    config = configuration(case, workers)
    config = override(config, {"bank.location": "actor", "bank.shards": 2})
    spec = bank_spec(config, output=str(tmp_path), name="bank", num_samples=NUM_SAMPLES)
    with pretended(workers) as trace, bank_in_process(spec) as bank:
        worker = Worker(case, workers)
        worker.store = build_store(config, bank, np.arange(NUM_SAMPLES), CUDA)
        waits = []
        for step, views in enumerate(worker.maker.views(worker.batches(6))):
            trace.clear()
            worker.step(views, step)
            waits.append(trace.waits.total())
    assert waits[1:] == [COUNTS[f"{case.recipe}|{workers}"]["step"][0]] * 5, waits


@pytest.mark.parametrize(("name", "most"), [("simclr", (4, 8)), ("moco_v2", (4, 8))])
def test_the_ceilings_match_the_documented_ones(name: str, most: tuple[int, int]) -> None:
    for workers in (1, 2):
        assert COUNTS[f"{name}|{workers}"]["step"][0] <= most[workers - 1]
    assert all(counts["views"][0] <= 2 for counts in COUNTS.values())


def test_the_documented_counts_are_the_ceilings() -> None:
    page = Path(__file__).parent.parent / "docs" / "gpu.md"
    assert table(COUNTS) in page.read_text()


class InMemoryDataset:
    """Rows of a data set in the form that evaluators read."""

    def __init__(self, worker: Worker, number: int) -> None:
        self._config, self._number = worker.config, number
        self.label = np.arange(number) % 3

    def __len__(self) -> int:
        return self._number

    def take(self, positions: Any, epoch: int = 0) -> Batch:
        return batch(self._config, 0, rows=len(positions))

    def where(self, keep: Any) -> "InMemoryDataset":
        chosen = copy(self)
        chosen.label = self.label[keep(np.arange(self._number))]
        chosen._number = len(chosen.label)
        return chosen

    def batches(self, size: int) -> Iterator[Batch]:
        yield self.take(range(self._number))


def spec_of(worker: Worker) -> Any:
    tokenizer = None if worker.vocabulary is None else worker.vocabulary.tokenizer
    encoder = worker.learner.tower.towers[0].encoder
    return complete_spec(encoder_specs(worker.config, tokenizer)[0], encoder, own=False)


def evaluator_of(worker: Worker) -> Any:
    bank, test = InMemoryDataset(worker, 64), InMemoryDataset(worker, 32)
    transform: Any = worker.maker.transform
    if worker.config.has_two_towers:
        return RetrievalEvaluator(bank=bank, test=test, transform=transform)  # type: ignore[arg-type]
    return KnnEvaluator(bank=bank, test=test, transform=transform, k=5)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["simclr", "simcse", "two_tower", "clip"])
def test_an_evaluator_measures(name: str, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    searched: list[bool] = []

    def noted(query: torch.Tensor, *rest: Any, **options: Any) -> Any:
        searched.append(is_on_device(query))
        return nearest(query, *rest, **options)

    monkeypatch.setattr("raycl.evaluation.search.nearest", noted)
    with pretended(workers):
        worker = Worker(CASES[name], workers)
        found = evaluator_of(worker).measure(worker.learner.tower, CUDA)
        baseline = evaluator_of(worker).baseline(CUDA)  # NCCL takes tensors of the device alone
    assert bool(baseline) == (name == "simclr")
    assert searched == [True] * (name in ("two_tower", "clip"))
    if workers == 1:
        on_cpu = Worker(CASES[name], device=CPU)
        expected = evaluator_of(on_cpu).measure(on_cpu.learner.tower, CPU)
        assert found == pytest.approx(expected)


def test_representations_are_copied_to_the_host_a_few_thousand_rows_at_a_time() -> None:
    with pretended() as trace:
        network = torch.nn.Linear(4, 2).to(CUDA)
        inputs = [torch.rand(256, 4, device=CUDA) for _ in range(2 * ROWS_AHEAD // 256 + 1)]
        trace.clear()
        rows = embed(network, inputs)
        assert trace.waits.total() == 3
        assert not is_on_device(rows)
        exact = embed(network, inputs[:1])
        rounded = embed(network, inputs[:1], precision="bfloat16")
    assert rounded.dtype == torch.float32
    assert 0 < (rounded - exact).abs().max() < 0.02
    assert exact.equal(rows[:256])


@pytest.mark.parametrize("workers", [1, 2])
def test_a_monitored_step_adds_no_wait_except_for_the_mean_over_workers(workers: int) -> None:
    with pretended(workers) as trace:
        worker = Worker(CASES["simclr"], workers)
        for step, views in enumerate(worker.maker.views(worker.batches(2))):
            trace.clear()
            stepped = worker.step(views, step, is_watched=True)
        assert trace.waits.total() == COUNTS[f"simclr|{workers}"]["step"][0]
        trace.clear()
        stepped.measure()
        assert trace.waits.total() == 2 * (workers - 1)


@dataclass
class Published:
    """A pool that keeps the weights of each step."""

    weights: dict[int, dict[str, Any]] = field(default_factory=dict)

    def begin(self) -> str:
        return "attempt"

    def publish(self, weights: Any, *, step: int, attempt: str) -> None:
        self.weights[step] = {name: each.copy() for name, each in weights.items()}


@pytest.mark.parametrize(("every", "expected"), [(1, [0, 1, 2, 3, 4, 5]), (2, [0, 2, 4])])
def test_published_weights_are_those_of_their_step_and_cost_the_host_no_wait(
    every: int, expected: list[int]
) -> None:
    case = CASES["moco_v2"]
    settings = {"momentum_encoder.location": "actors", "momentum_encoder.publish_every": every}
    config, pool, waits, states = override(configuration(case), settings), Published(), [], []
    with pretended() as trace:
        worker = Worker(case)
        assert worker.learner.momentum_encoder is not None
        encoder = worker.learner.momentum_encoder.tower
        client = KeyClient(pool, config, CUDA)  # type: ignore[arg-type]
        client.begin(encoder, step=0)
        side: Any = client._side_stream
        for step, views in enumerate(worker.maker.views(worker.batches(6))):
            states.append({name: each.cpu().numpy().copy() for name, each in encoder.state_dict().items()})
            trace.clear()
            worker.step(views, step)
            client.publish(encoder, step=step + 1)
            waits.append(trace.counts[:2])
            num_sent = len(pool.weights)
            client.publish(encoder, step=step + 1)
            assert len(pool.weights) == num_sent, "the copy is not complete"
            side.finish(side.launched, {})
    assert waits == [tuple(COUNTS["moco_v2|1"]["step"][:2])] * 6
    assert list(pool.weights) == expected
    for step, weights in pool.weights.items():
        assert weights.keys() == states[step].keys()
        for name, each in weights.items():
            np.testing.assert_array_equal(each, states[step][name])
            assert each.dtype == states[step][name].dtype


def test_a_slow_copy_is_not_replaced_by_a_newer_one() -> None:
    config = override(configuration(CASES["moco_v2"]), {"momentum_encoder.location": "actors"})
    pool, layer = Published(), torch.nn.Linear(3, 1)
    with pretended():
        layer.to(CUDA)
        client = KeyClient(pool, config, CUDA)  # type: ignore[arg-type]
        client.begin(layer, step=0)
        side: Any = client._side_stream
        for step in (1, 2, 3):
            client.publish(layer, step=step)
        side.finish(side.launched, {})
        client.publish(layer, step=4)
    assert list(pool.weights) == [0, 1]


def test_a_state_of_all_sizes_is_packed_and_unpacked() -> None:
    values = [
        torch.arange(3.0),
        torch.tensor(7),
        torch.arange(5).half(),
        torch.tensor([True]),
        torch.rand(2, 3).T,
    ]
    with pretended():
        state = {str(number): each.to(CUDA) for number, each in enumerate(values)}
        arrived = StateDownload(state, torch.cuda.Stream()).arrived()
    assert arrived.keys() == state.keys()
    for number, each in enumerate(values):
        assert arrived[str(number)].dtype == each.dtype
        assert arrived[str(number)].equal(each)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_leakage_probe_runs(workers: int) -> None:
    case = CASES["moco_v2"]
    with pretended(workers):
        worker = Worker(case, workers)
        views = next(worker.maker.views(worker.batches(1)))
        found = worker.learner.leakage(views, seed=0)
    assert found.keys() == {"batchnorm_leakage"}


@pytest.mark.parametrize("is_tracked", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_synchronized_layer_takes_rows_in_bfloat16(dtype: torch.dtype, is_tracked: bool) -> None:
    torch.manual_seed(0)
    layer = nn.BatchNorm2d(5, track_running_stats=is_tracked).to(dtype)
    rows, gradient = torch.randn(2, 4, 5, 3, 3).bfloat16()
    exact, whole = deepcopy(layer).float(), torch.cat([rows, rows]).float().requires_grad_()
    expected = exact(whole)
    expected.backward(torch.cat([gradient, gradient]).float())
    with pretended(2):  # the other worker has the same rows
        ours, own = synchronize(layer).to(CUDA), rows.to(CUDA).requires_grad_()
        output = ours(own)
        output.backward(gradient.to(CUDA))
        came = [each.cpu() for each in (output.detach(), own.grad, ours.weight.grad, *ours.buffers())]
    gradients = (whole.grad[:4], exact.weight.grad / 2)
    for found, true in zip(came, (expected[:4].detach(), *gradients, *exact.buffers()), strict=True):
        torch.testing.assert_close(found, true, rtol=0.02, atol=0.02, check_dtype=False)


def test_a_worker_without_rows_takes_part_in_synchronized_batchnorm(monkeypatch: pytest.MonkeyPatch) -> None:
    other = torch.randn(6, 5)
    exact = nn.BatchNorm1d(5)
    exact(other)
    with pretended(2):
        moments = _device_moments(other.to(CUDA), exact.eps)
        monkeypatch.setattr(synchronized, "gather_detached", lambda own: torch.cat([own, moments]))
        layer, rows = synchronize(nn.BatchNorm1d(5)).to(CUDA), torch.empty(0, 5).to(CUDA).requires_grad_()
        output = layer(rows)
        output.backward(torch.empty(0, 5).to(CUDA))
        came = [each.cpu() for each in layer.buffers()]
        of_weight = layer.weight.grad.cpu()
    assert output.shape == rows.grad.shape == rows.shape
    torch.testing.assert_close(came, list(exact.buffers()))
    assert not of_weight.any()


@pytest.mark.parametrize("name", ["simclr", "moco_v2 in batch"])
def test_a_ring_of_workers_replaces_a_gather(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gathered = count(CASES[name], 2)
    monkeypatch.setattr("raycl.distributed.collectives.MAX_GATHERED_BYTES", 0)
    passed_on = count(CASES[name], 2)
    assert passed_on.losses == pytest.approx(gathered.losses, rel=1e-4)
    assert passed_on.step.launches != gathered.step.launches


@pytest.mark.parametrize("name", ["simclr lars", "simclr muon", "moco_v2", "instance_discrimination", "clip"])
def test_a_checkpoint_from_a_cpu_resumes_on_a_gpu(name: str) -> None:
    case = CASES[name]
    before = Worker(case, device=CPU)
    batches = list(before.maker.views(before.batches(2)))
    torch.manual_seed(0)
    before.step(batches[0], 0)
    kept, stored = before.learner.state_dict(), before.store.state_dict()
    with pretended():
        worker = Worker(case)
        worker.learner.load_state_dict(kept)
        worker.store.load_state_dict(stored)
        views = list(worker.maker.views(worker.batches(2)))[1]
        torch.manual_seed(1)
        loss = worker.step(views, 1).loss
        states = worker.learner.optimizer.state.values()
        tensors = [each for state in states for each in state.values() if isinstance(each, torch.Tensor)]
        assert all(is_on_device(each) for each in tensors if each.ndim)
    torch.manual_seed(1)
    assert loss == pytest.approx(before.step(batches[1], 1).loss, rel=1e-4)


def test_saved_encoders_run_on_their_own_device() -> None:
    with pretended():
        worker = Worker(CASES["simclr"])
        spec: Any = spec_of(worker)
        images = ImageEncoder(worker.learner.tower.towers[0].encoder, spec).eval()
        pixels = np.zeros((20, 24, 3), np.uint8)
        for given in (np.stack([pixels] * 3), [pixels] * 3, []):
            rows = images.encode(given)
            assert is_on_device(rows)
            assert rows.shape == (len(given), spec.representation_dim)
        worker = Worker(CASES["simcse"])
        spec = spec_of(worker)
        vocabulary = Vocabulary.stand_in()
        texts = TextEncoder(worker.learner.tower.towers[0].encoder, spec, vocabulary.tokenizer).eval()
        for batch in (["a b", "c"], []):
            rows = texts.encode(batch)
            assert is_on_device(rows)
            assert rows.shape == (len(batch), spec.representation_dim)


def test_the_slots_of_a_bank_are_initialized_with_embeddings() -> None:
    with pretended():
        worker = Worker(CASES["instance_discrimination"])
        samples, ids = worker.maker.plain(batch(worker.config, 0))
        with torch.no_grad():
            rows = worker.learner.encode(samples)
        store: Any = worker.store
        store.initialize(rows, ids)
        stored = store.fetch(next(worker.maker.views(worker.batches(1))), step=0)
        torch.testing.assert_close(F.normalize(stored.key, dim=1), F.normalize(rows, dim=1))


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", ["simclr", "simcse", "two_tower"])
def test_a_snapshot_is_written(name: str, workers: int, tmp_path: Path) -> None:
    with pretended(workers):
        worker = Worker(CASES[name], workers)
        rows: Any = InMemoryDataset(worker, 64)
        writer = SnapshotWriter(
            rows=rows,
            positions=np.arange(20),
            transform=worker.maker.transform,
            output=Place(str(tmp_path)),
            tokenizer=None,
            held_out=True,
            seed=0,
        )
        writer.write(worker.learner.tower, CUDA, step=5)
    assert (tmp_path / "embedding_snapshots" / "latest.parquet").exists()
