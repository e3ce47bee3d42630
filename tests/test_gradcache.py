"""Gradients compared with GradCache: equal without BatchNorm, different with it."""

import sys

import gradcache.context_managers
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.gradient_cache import embed_in_chunks
from raycl.losses import info_nce
from tests.test_accumulation import gradient_of, images, resnet

# Its files still import each other by the package's name before publication.
sys.modules.setdefault("grad_cache", gradcache)
sys.modules.setdefault("grad_cache.context_managers", gradcache.context_managers)
from gradcache.grad_cache import GradCache

CHUNK_SIZE, TEMPERATURE = 8, 0.2


def contrast(query: Tensor, key: Tensor) -> Tensor:
    return F.cross_entropy(query @ key.T / TEMPERATURE, torch.arange(len(query)))


def by_gradcache(tower: nn.Module) -> Tensor:
    GradCache(models=[tower, tower], chunk_sizes=CHUNK_SIZE, loss_fn=contrast)(images(), images(seed=1))
    return gradient_of(tower)


def by_raycl(tower: nn.Module) -> Tensor:
    query, key = (embed_in_chunks(tower, images(seed=seed), chunk_size=CHUNK_SIZE) for seed in (0, 1))
    info_nce(query, key, temperature=TEMPERATURE).backward()
    return gradient_of(tower)


def whole(tower: nn.Module) -> Tensor:
    contrast(tower(images()), tower(images(seed=1))).backward()
    return gradient_of(tower)


@pytest.mark.parametrize("norm", ["layer", "group", "frozen"])
def test_gradcache_and_raycl_give_the_gradient_of_the_whole_batch(norm: str) -> None:
    expected = whole(resnet(norm))
    for gradient in (by_gradcache(resnet(norm)), by_raycl(resnet(norm))):
        assert (gradient - expected).norm() < 1e-5 * expected.norm()


def test_raycl_gives_the_gradient_with_batchnorm_and_gradcache_does_not() -> None:
    towers = {name: resnet("batch") for name in ("whole", "gradcache", "raycl")}
    expected = whole(towers["whole"])
    assert (by_raycl(towers["raycl"]) - expected).norm() < 1e-5 * expected.norm()
    assert (by_gradcache(towers["gradcache"]) - expected).norm() > 0.1 * expected.norm()
    means = {name: dict(tower.named_buffers()) for name, tower in towers.items()}
    name = next(each for each in means["whole"] if each.endswith("running_mean"))
    assert torch.allclose(means["raycl"][name], means["whole"][name], rtol=1e-5, atol=1e-7)
    assert not torch.allclose(means["gradcache"][name], means["whole"][name], rtol=0.1)
