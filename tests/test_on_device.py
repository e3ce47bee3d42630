"""Kernels, copies and messages of a real GPU, compared with float64 and with the CPU.

``RAYCL_GPU_TESTS_ON=cpu pytest -m gpu`` runs them on a CPU, to check the tests themselves.
"""

import copy
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.batchnorm import synchronize
from raycl.distributed import all_agree, check_equal, mean_over_workers, rank
from raycl.distributed.device_copy import StateDownload
from raycl.gradient_cache import embed_in_chunks
from raycl.losses import clip, hinge, info_nce, nce, nt_xent
from raycl.models.image import build_image_encoder
from tests.embeddings import make_rows, make_views
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients
from tests.images import write_digits
from tests.plain_losses import (
    WAYS,
    plain_bidirectional,
    plain_hinge,
    plain_info_nce,
    plain_nce,
    plain_nt_xent,
)
from tests.pretended_steps import CASES, Case, Worker, steps_on

DEVICE = torch.device(os.environ.get("RAYCL_GPU_TESTS_ON", "cuda"))
CPU = torch.device("cpu")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE.type == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def exact_convolutions() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32
    torch.backends.cudnn.allow_tf32 = False
    yield
    torch.backends.cudnn.allow_tf32 = before


# Losses


def compare(
    loss: Callable[..., Tensor], plain: Callable[..., Tensor], inputs: list[Tensor], tolerance: float
) -> None:
    """Compare value and gradients of a loss on the device with its formula in float64 on the CPU."""
    on_device = leaves(*(each.to(DEVICE) for each in inputs))
    exact = leaves(*inputs, dtype=torch.float64)
    came = value_and_gradients(loss(*on_device), on_device)
    assert all(each.device.type == DEVICE.type for each in came)
    assert_close([each.cpu() for each in came], value_and_gradients(plain(*exact), exact), tolerance)


@pytest.mark.parametrize("temperature", (0.5, 0.05))
@pytest.mark.parametrize("num_rows", (7, 300, 1500))
def test_nt_xent_equals_its_formula(num_rows: int, temperature: float) -> None:
    ids = torch.arange(num_rows) % (num_rows - 3)
    inputs = [*make_views(num_rows, 32), torch.tensor(temperature)]
    compare(
        lambda a, b, t: nt_xent(a, b, temperature=t, sample_id=ids.to(DEVICE)),
        lambda a, b, t: plain_nt_xent(a, b, t, ids=(ids, ids)),
        inputs,
        tolerance_at(temperature),
    )


@pytest.mark.parametrize("temperature", (0.5, 0.05))
@pytest.mark.parametrize("num_negatives", (5, 3000))
def test_info_nce_equals_its_formula(num_negatives: int, temperature: float) -> None:
    inputs = [*make_views(300, 32), torch.tensor(temperature), make_rows(num_negatives, 32)]
    compare(
        lambda query, key, t, negatives: info_nce(query, key, temperature=t, negatives=negatives),
        lambda query, key, t, negatives: plain_info_nce(query, key, t, negatives),
        inputs,
        tolerance_at(temperature),
    )


@pytest.mark.parametrize("temperature", (0.5, 0.05))
def test_clip_equals_its_formula(temperature: float) -> None:
    inputs = [*make_views(300, 32), torch.tensor(temperature), make_rows(700, 32)]
    compare(
        lambda query, key, t, negatives: clip(query, key, temperature=t, negatives=negatives),
        plain_bidirectional,
        inputs,
        tolerance_at(temperature),
    )


@pytest.mark.parametrize("ways", WAYS)
def test_hinge_equals_its_formula(ways: dict[str, Any]) -> None:
    inputs = [*make_views(300, 32, noise=1.0), make_rows(700, 32)]
    compare(
        lambda query, key, negatives: hinge(query, key, margin=0.2, negatives=negatives, **ways),
        partial(plain_hinge, margin=0.2, **ways),
        inputs,
        1e-5,
    )


@pytest.mark.parametrize("temperature", (0.5, 0.07))
def test_nce_equals_its_formula(temperature: float) -> None:
    query, positive, noise = make_rows(64, 16), make_rows(64, 16, seed=2), make_rows(700, 16, seed=3)
    ids, noise_id = torch.arange(64), torch.arange(700) % 90
    log_normalizer = 8.0 + 0.4 / temperature
    compare(
        lambda q, t: nce(
            q,
            positive.to(DEVICE),
            noise.to(DEVICE),
            num_samples=5000,
            temperature=t,
            log_normalizer=log_normalizer,
            sample_id=ids.to(DEVICE),
            noise_id=noise_id.to(DEVICE),
        ),
        lambda q, t: plain_nce(
            q, positive.double(), noise.double(), t, 5000, log_normalizer, ids[:, None] == noise_id
        ),
        [query, torch.tensor(temperature)],
        tolerance_at(temperature),
    )


def test_bfloat16_rows_add_no_error_beyond_their_own_rounding() -> None:
    half = leaves(*(each.to(DEVICE) for each in make_views(300, 32)), dtype=torch.bfloat16)
    exact = leaves(*(each.cpu() for each in half), dtype=torch.float64)
    true = value_and_gradients(plain_nt_xent(*exact, torch.tensor(0.1).double()), exact)
    came = [each.cpu() for each in value_and_gradients(nt_xent(*half, temperature=0.1), half)]
    assert_close(came[:1], true[:1], 1e-5)
    assert_close(came[1:], true[1:], 5e-3)


# Towers


# In float32 a ReLU with an input near 0 may open on one device only, which changes the gradient by 1%.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 5e-2)])
@pytest.mark.parametrize("activation_checkpoint_every", (1, None))
@pytest.mark.parametrize("is_synchronized", (False, True))
def test_chunks_with_batchnorm_give_the_gradient_of_the_whole_batch(
    is_synchronized: bool, activation_checkpoint_every: int | None, dtype: torch.dtype, tolerance: float
) -> None:
    torch.manual_seed(0)
    tower = nn.Sequential(
        build_image_encoder("resnet10", image_size=32, stem="half", width=0.25), nn.Flatten()
    )
    images = torch.randn(24, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def gradient(tower: nn.Module, embeddings: Tensor) -> Tensor:
        query, key = F.normalize(embeddings, dim=1).chunk(2)
        logits = query @ key.T / 0.2
        F.cross_entropy(logits, torch.arange(len(query), device=logits.device)).backward()
        return torch.cat([p.grad.flatten() for p in tower.parameters() if p.grad is not None]).cpu().double()

    exact = copy.deepcopy(tower).double()
    true = gradient(exact, exact(images.double()))
    ours = (synchronize(tower) if is_synchronized else tower).to(DEVICE, dtype)
    rows = images.to(DEVICE, dtype)
    came = gradient(
        ours,
        embed_in_chunks(ours, rows, chunk_size=7, activation_checkpoint_every=activation_checkpoint_every),
    )
    assert (came - true).norm() < tolerance * true.norm()


@pytest.mark.parametrize("name", ["simclr", "simclr blur", "simcse", "esimcse", "two_tower", "clip"])
def test_views_equal_the_views_on_the_cpu(name: str) -> None:
    here, there = (Worker(CASES[name], device=device) for device in (CPU, DEVICE))
    for expected, came in zip(
        here.maker.views(here.batches(3)), there.maker.views(there.batches(3)), strict=True
    ):
        assert came.view_a.device.type == DEVICE.type
        torch.testing.assert_close(came.view_a.cpu(), expected.view_a, rtol=1e-4, atol=1e-4)
        if expected.view_b is not None and came.view_b is not None:
            torch.testing.assert_close(came.view_b.cpu(), expected.view_b, rtol=1e-4, atol=1e-4)
        assert came.sample_id.cpu().equal(expected.sample_id)


@pytest.mark.parametrize("name", CASES)
def test_steps_update_the_weights_as_on_the_cpu(name: str) -> None:
    case = without_dropout(CASES[name])
    expected_losses, expected_updates = steps_on(CPU, case)
    losses, updates = steps_on(DEVICE, case)
    is_rounded = "bfloat16" in name
    assert losses == pytest.approx(expected_losses, rel=2e-2 if is_rounded else 2e-4)
    # Batch normalization of tiny maps multiplies the rounding of one step by up to 200 in the next.
    for came, expected, error in zip(updates, expected_updates, (2e-2, 0.1, 0.1), strict=True):
        assert (came - expected).norm() < (0.3 if is_rounded else error) * expected.norm()


def without_dropout(case: Case) -> Case:
    """Return the case without dropout, whose random numbers depend on the device."""
    name = "text_encoder.kwargs" if case.recipe == "clip" else "encoder.kwargs"
    if case.recipe not in ("simcse", "esimcse", "two_tower", "clip"):
        return case
    return replace(case, settings=case.settings | {name: case.settings.get(name, {}) | {"dropout": 0.0}})


def test_a_checkpoint_from_a_cpu_continues_on_the_device() -> None:
    case = CASES["moco_v2"]
    before = Worker(case, device=CPU)
    batches = list(before.maker.views(before.batches(2)))
    before.step(batches[0], 0)
    worker = Worker(case, device=DEVICE)
    worker.learner.load_state_dict(before.learner.state_dict())
    worker.store.load_state_dict(before.store.state_dict())
    views = list(worker.maker.views(worker.batches(2)))[1]
    assert worker.step(views, 1).loss == pytest.approx(before.step(batches[1], 1).loss, rel=1e-4)


def test_a_run_from_a_cpu_resumes_on_the_device(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    data = write_digits(tmp_path / "digits.parquet", 64)
    command = [sys.executable, "-m", "raycl", "train", "simclr", "--data", str(data)]
    command += ["--output", str(tmp_path / "run"), "--batch-size", "16"]
    small = {"encoder.name": "resnet10", "encoder.stem": "half", "encoder.width": 0.25}
    command += [f"--set={name}={value}" for name, value in small.items()]
    subprocess.run([*command, "--steps", "3"], check=True)
    gpu = ["--gpu"] if DEVICE.type == "cuda" else []
    subprocess.run([*command, "--steps", "6", "--resume", *gpu], check=True)


# Messages


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[str]:
    """Join a process group of one rank, created like Ray Train's."""
    backend = "nccl" if DEVICE.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield backend
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16, torch.float16, torch.int64))
def test_the_backend_supports_every_dtype_that_raycl_sends(process_group: str, dtype: torch.dtype) -> None:
    rows = torch.arange(24, device=DEVICE).view(6, 4).to(dtype)
    stacked = torch.empty_like(rows)
    dist.all_gather_into_tensor(stacked, rows)
    assert stacked.equal(rows)
    total = rows.clone()
    dist.all_reduce(total)
    assert total.equal(rows)
    if process_group == "nccl":
        part = torch.empty_like(rows)
        dist.reduce_scatter_tensor(part, rows)
        assert part.equal(rows)
        received = torch.empty_like(rows)
        for work in dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, rows, 0), dist.P2POp(dist.irecv, received, 0)]
        ):
            work.wait()
        assert received.equal(rows)


def test_a_state_arrives_as_it_was_although_later_steps_change_it() -> None:
    on_gpu = DEVICE.type == "cuda"
    network = build_image_encoder("resnet18", image_size=32).to(DEVICE)
    network.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    state = network.state_dict()
    expected = {name: each.cpu().clone() for name, each in state.items()}
    copied = StateDownload(state, torch.cuda.Stream(DEVICE) if on_gpu else None)
    if on_gpu:  # state on the host is not copied
        for each in state.values():
            each.zero_()
    arrived = copied.arrived()
    assert copied.has_arrived()
    assert arrived.keys() == expected.keys()
    assert all(arrived[name].equal(each) for name, each in expected.items())
    assert all(each.device.type == "cpu" for each in arrived.values())


def test_workers_agree(process_group: str) -> None:
    assert rank() == 0
    assert all_agree(True)
    assert not all_agree(False)
    check_equal(5, "the local batch size")
    assert mean_over_workers([1.5, 2.5]) == [1.5, 2.5]


@pytest.mark.parametrize("precision", ("float32", "bfloat16"))
def test_gradients_pass_through_the_reducer(process_group: str, precision: str) -> None:
    tower = build_image_encoder("resnet10", image_size=32, stem="half", width=0.25).to(DEVICE)
    tower.to(memory_format=torch.channels_last)
    alone = copy.deepcopy(tower)
    parallel = nn.parallel.DistributedDataParallel(
        tower, device_ids=[DEVICE] if DEVICE.type == "cuda" else None, gradient_as_bucket_view=True
    )
    images = torch.randn(8, 3, 32, 32, device=DEVICE).to(memory_format=torch.channels_last)
    for network in (parallel, alone):
        with torch.autocast(DEVICE.type, torch.bfloat16, enabled=precision == "bfloat16"):
            embeddings = network(images)
        embeddings.float().square().mean().backward()
    for came, expected in zip(tower.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(came.grad, expected.grad, rtol=1e-3, atol=1e-4)
