"""Chunks on several workers against one forward and backward pass over all their rows."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from raycl.batchnorm import synchronize
from raycl.distributed import gather, rank
from raycl.gradient_cache.chunked_batchnorm import ChunkedBatchNorm
from raycl.models.image import build_image_encoder
from raycl.models.towers import Tower, build_projection_head
from tests.workers.processes import run_workers


def _rows(num_rows: int = 24) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    return torch.randn(num_rows, 3, 8, 8, generator=generator, dtype=torch.float64) + 1


def _tower() -> Tower:
    torch.manual_seed(0)
    encoder = build_image_encoder("resnet10", image_size=8, width=0.125)
    return Tower(encoder, build_projection_head(64, num_layers=2, hidden_dim=8, dim=4)).double()


def _loss(keys: Tensor, query: Tensor, offset: int) -> Tensor:
    """Return the mean loss over the local queries against all rows as keys."""
    logits = query @ keys.flip(1).T / 0.2
    return F.cross_entropy(logits, (torch.arange(len(query)) + offset) * 5 % len(keys))


def _state(tower: nn.Module) -> dict[str, Tensor | None]:
    gradients = {f"{name}.grad": each.grad for name, each in tower.named_parameters()}
    return gradients | dict(tower.named_buffers())


def _step(
    worker: int, num_workers: int, tower: Tower, rows: Tensor, sizes: list[int], every: int | None
) -> dict[str, Tensor | None]:
    own = rows.split(sizes)[worker]
    chunks = ChunkedBatchNorm(synchronize(tower), chunk_size=5, activation_checkpoint_every=every)
    embeddings = chunks.embed(own)
    chunks.backward(embeddings.flip(0) * len(own))
    return _state(tower)


@pytest.mark.parametrize("every", [None, 1])
@pytest.mark.parametrize("sizes", [[12, 12], [17, 7], [23, 1], [24, 0], [9, 11, 4]], ids=str)
def test_workers_with_any_share_of_the_rows_equal_one_process(sizes: list[int], every: int | None) -> None:
    tower = _tower()
    tower.encoder.get_submodule("layer1").requires_grad_(False)
    shares = run_workers(_step, len(sizes), copy.deepcopy(tower), _rows(), sizes, every)
    embeddings = tower(_rows())
    asked = [part.flip(0) * len(part) for part in embeddings.detach().split(sizes)]
    embeddings.backward(torch.cat(asked))
    for name, true in _state(tower).items():
        ours = [share[name] for share in shares]
        if true is None:
            assert ours == [None] * len(sizes)
        elif name.endswith("grad"):
            torch.testing.assert_close(sum(ours), true, rtol=1e-6, atol=1e-8, msg=name)
        else:
            for each in ours:
                torch.testing.assert_close(each, true, rtol=1e-10, atol=1e-10, msg=name)


def _average(tower: nn.Module, num_workers: int) -> None:
    for parameter in tower.parameters():
        assert parameter.grad is not None
        torch.distributed.all_reduce(parameter.grad)
        parameter.grad /= num_workers


def _contrast(worker: int, num_workers: int, tower: Tower, rows: Tensor) -> dict[str, Tensor | None]:
    own = rows.chunk(num_workers)[worker]
    chunks = ChunkedBatchNorm(synchronize(tower), chunk_size=5)
    leaf = chunks.embed(own).requires_grad_()
    _loss(gather(leaf), leaf, rank() * len(own)).backward()
    assert leaf.grad is not None
    chunks.backward(leaf.grad)
    _average(tower, num_workers)
    return _state(tower)


def _contrast_under_ddp(
    worker: int, num_workers: int, tower: Tower, rows: Tensor
) -> dict[str, Tensor | None]:
    own = rows.chunk(num_workers)[worker]
    parallel = DistributedDataParallel(synchronize(tower))
    embeddings = parallel(own)
    _loss(gather(embeddings), embeddings, rank() * len(own)).backward()
    return _state(tower)


def test_averaged_gradients_equal_ddp_and_one_process() -> None:
    tower = _tower()
    ours = run_workers(_contrast, 2, copy.deepcopy(tower), _rows())
    ddp = run_workers(_contrast_under_ddp, 2, copy.deepcopy(tower), _rows())
    embeddings = tower(_rows())
    _loss(embeddings, embeddings, 0).backward()
    for share in (*ours, *ddp):
        torch.testing.assert_close(share, _state(tower), rtol=1e-5, atol=1e-7)


def _wrapped(worker: int, num_workers: int, tower: Tower, rows: Tensor) -> dict[str, Tensor | None]:
    """Train a tower that is also wrapped by DDP: first in chunks, then in an ordinary step."""
    own = rows.chunk(num_workers)[worker]
    parallel = DistributedDataParallel(synchronize(tower))
    chunks = ChunkedBatchNorm(tower, chunk_size=5)
    chunks.backward(torch.ones_like(chunks.embed(own)))
    tower.zero_grad()
    parallel(own).sum().backward()
    return _state(tower)


def test_ddp_around_the_tower_still_works() -> None:
    tower = _tower()
    shares = run_workers(_wrapped, 2, copy.deepcopy(tower), _rows())
    tower(_rows())
    (tower(_rows()).sum() / 2).backward()
    for share in shares:
        torch.testing.assert_close(share, _state(tower), rtol=1e-5, atol=1e-6)


def _alone(worker: int, num_workers: int, tower: Tower, num_rows: int) -> int:
    return len(ChunkedBatchNorm(synchronize(tower), chunk_size=5).embed(_rows(num_rows)[worker : worker + 1]))


def test_a_single_value_per_channel_over_all_workers_is_refused() -> None:
    tower = Tower(nn.Flatten(), nn.Sequential(nn.Linear(192, 4), nn.BatchNorm1d(4))).double()
    assert run_workers(_alone, 2, tower, 2) == [1, 1]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        run_workers(_alone, 2, tower, 1)


def _step_alone(worker: int, num_workers: int) -> dict[str, Tensor | None]:
    tower, own = _tower(), _rows().chunk(num_workers)[worker]
    chunks = ChunkedBatchNorm(tower, chunk_size=5)
    chunks.backward(chunks.embed(own).flip(0))
    return _state(tower)


def test_unsynchronized_layers_use_the_statistics_of_their_own_worker() -> None:
    for worker, state in enumerate(run_workers(_step_alone, 2)):
        tower = _tower()
        embeddings = tower(_rows().chunk(2)[worker])
        embeddings.backward(embeddings.detach().flip(0))
        for name, expected in _state(tower).items():
            torch.testing.assert_close(state[name], expected, rtol=1e-9, atol=1e-10)
