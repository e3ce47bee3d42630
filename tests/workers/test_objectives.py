"""Every loss over real workers, with a gather or a ring, equals the plain formula on the whole batch."""

from dataclasses import replace

import pytest

from raycl.loss_specs import LOSSES
from tests.gradients import assert_close
from tests.workers.objectives import CASES, Setup, on_the_whole_batch, on_workers

WEIGHTED = [name for name, case in CASES.items() if LOSSES[case.loss].row_weights]


@pytest.mark.parametrize("num_workers", (1, 2, 4))  # test_ring.py has rings of three
@pytest.mark.parametrize("by_ring", (False, True))
@pytest.mark.parametrize("name", CASES)
def test_workers_give_the_loss_and_gradients_of_the_whole_batch(
    name: str, by_ring: bool, num_workers: int
) -> None:
    setup = Setup(num_workers=num_workers, by_ring=by_ring)
    expected = on_the_whole_batch(name, setup)
    assert expected[1].norm() > 1e-3
    assert_close(on_workers(name, setup), expected, 1e-9, 1e-12)


@pytest.mark.parametrize(("num_workers", "by_ring"), [(1, False), (2, False), (2, True)])
@pytest.mark.parametrize("name", WEIGHTED)
def test_weights_of_rows_give_the_weighted_mean_of_the_whole_batch(
    name: str, num_workers: int, by_ring: bool
) -> None:
    setup = Setup(num_workers=num_workers, by_ring=by_ring, weights=True)
    expected = on_the_whole_batch(name, setup)
    assert (expected[1] - on_the_whole_batch(name, Setup())[1]).norm() > 1e-3
    assert_close(on_workers(name, setup), expected, 1e-9, 1e-12)


@pytest.mark.parametrize("num_workers", (2, 3, 4))
@pytest.mark.parametrize("weights", (False, True))
@pytest.mark.parametrize("temperature", (0.2, 0.01))
def test_a_ring_that_shares_the_logits_of_clip_gives_the_gradients_of_the_whole_batch(
    temperature: float, weights: bool, num_workers: int
) -> None:
    setup = Setup(temperature=temperature, queue=False, explicit=False, weights=weights)
    on_ring = replace(setup, num_workers=num_workers, by_ring=True)
    assert_close(on_workers("clip", on_ring), on_the_whole_batch("clip", setup), 1e-9, 1e-12)


@pytest.mark.parametrize("name", CASES)
def test_embeddings_in_chunks_give_the_gradient_of_both_towers(name: str) -> None:
    setup = Setup(num_workers=2, chunks=3)
    assert_close(on_workers(name, setup), on_the_whole_batch(name, setup), 1e-9, 1e-12)
