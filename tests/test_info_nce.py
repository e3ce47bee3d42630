"""InfoNCE with keys from the batch, other workers and a queue, against the plain formula."""

import re
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import info_nce
from tests.embeddings import make_pair_ids, make_rows, make_views, named_ids
from tests.gradients import assert_close, leaves, tolerance_at, value_and_gradients, wanting
from tests.plain_losses import plain_info_nce
from tests.tiles import MetricsLogger, count_products

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPERATURES = (1.0, 0.2, 0.07, 0.03, 0.01)
WORKERS = {"batch": st.integers(1, 9), "before": st.integers(0, 4), "after": st.integers(0, 4)}
CANDIDATES: dict[str, st.SearchStrategy[Any]] = {
    "num_negatives": st.integers(0, 12),
    "num_ids": st.integers(1, 12),
    "in_batch": st.booleans(),
    "temperature": st.sampled_from(TEMPERATURES),
    "seed": st.integers(0, 10_000),
}


def compare_with_plain(
    query: Tensor,
    key: Tensor,
    temperature: float,
    negatives: Tensor,
    dtype: torch.dtype = torch.float32,
    **arguments: Any,
) -> Tensor:
    """Compare the value and all four gradients with the plain formula in float64; return the value."""
    inputs = leaves(query, key, torch.tensor(temperature), negatives, dtype=dtype)
    exact = leaves(*inputs, dtype=torch.float64)
    ids, negative_id = arguments.pop("ids", None), arguments.pop("negative_id", None)
    true = plain_info_nce(*exact, ids=ids, negative_id=negative_id, **arguments)
    if arguments.get("in_batch", True):
        arguments |= {"gathered_key": inputs[1], "gathered_sample_id": None if ids is None else ids[1]}
    start = arguments.get("offset", 0)
    ours = info_nce(
        inputs[0],
        inputs[1][start : start + len(query)],
        temperature=inputs[2],
        negatives=inputs[3],
        sample_id=None if ids is None else ids[0],
        negative_id=negative_id,
        **arguments,
    )
    # Even in float64 the plain formula rounds 1 - p with an error of 1e-16, and equal similarities
    # cancel in the gradient of the temperature, whose terms are as large as 1 / temperature**2.
    tolerance, floor = tolerance_at(temperature), 1e-15 / temperature**2
    if dtype == torch.float64:
        tolerance, floor = 1e-10, 1e-11 + 1e-14 / temperature**2
    plain = [
        torch.zeros_like(tensor) if gradient is None else gradient
        for tensor, gradient in zip(
            [true, *exact], [true, *torch.autograd.grad(true, exact, allow_unused=True)], strict=True
        )
    ]
    assert_close(value_and_gradients(ours, inputs), plain, tolerance, floor)
    return true


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("in_batch", (True, False))
@pytest.mark.parametrize(
    ("batch", "dim", "num_negatives"), ((1, 3, 1), (3, 2, 7), (7, 5, 1025), (257, 9, 2100), (515, 17, 0))
)
def test_the_value_and_all_gradients_equal_the_plain_formula(
    batch: int, dim: int, num_negatives: int, in_batch: bool, temperature: float
) -> None:
    compare_with_plain(*make_views(batch, dim), temperature, make_rows(num_negatives, dim), in_batch=in_batch)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
def test_the_loss_over_many_pieces_of_gathered_keys_equals_the_plain_formula(temperature: float) -> None:
    query, key = make_views(1100, 6)
    compare_with_plain(query[300:700], key, temperature, make_rows(1030, 6), offset=300)


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("in_batch", (True, False))
def test_candidates_with_the_same_id_are_masked_from_every_source(in_batch: bool, temperature: float) -> None:
    query, key = make_views(300, 9)
    sample_id, negative_id = torch.arange(300) % 240, torch.arange(2500) % 777
    masked = {"ids": (sample_id, sample_id), "negative_id": negative_id, "in_batch": in_batch}
    compare_with_plain(query, key, temperature, make_rows(2500, 9), **masked)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    **WORKERS,
    dim=st.integers(1, 6),
    **CANDIDATES,
)
def test_the_loss_of_any_sizes_and_ids_equals_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    dim: int,
    num_negatives: int,
    num_ids: int,
    in_batch: bool,
    temperature: float,
    seed: int,
) -> None:
    if not in_batch:
        before = after = 0
    generator = torch.Generator().manual_seed(seed)
    gathered_id = torch.randint(num_ids, (before + batch + after,), generator=generator)
    negative_id = torch.randint(num_ids, (num_negatives,), generator=generator)
    query, key = make_views(before + batch + after, dim, seed=seed)
    compare_with_plain(
        query[before : before + batch],
        key,
        temperature,
        make_rows(num_negatives, dim, seed),
        torch.float64,  # tiny cases cancel: in float32 a gradient of 0 would be rounded
        in_batch=in_batch,
        offset=before,
        ids=(gathered_id[before : before + batch], gathered_id),
        negative_id=negative_id,
    )


def compare_pairs_with_plain(
    query: Tensor,
    key: Tensor,
    temperature: float,
    negatives: Tensor,
    *,
    own: slice | None,
    pair_ids: tuple[Tensor, Tensor],
    negative_id: Tensor,
    in_batch: bool = True,
    floor: float = 1e-15,
) -> None:
    """Compare the value and all four gradients of one worker with pair ids with the plain formula."""
    mine = slice(0, len(query)) if own is None else own
    inputs = leaves(query[mine], key, torch.tensor(temperature), negatives, dtype=torch.float64)
    where = {"in_batch": in_batch, "offset": mine.start, "negative_id": negative_id}
    true = plain_info_nce(*inputs, pair_ids=pair_ids, **where)
    ours = info_nce(
        inputs[0],
        inputs[1][mine],
        temperature=inputs[2],
        gathered_key=inputs[1] if in_batch and own is not None else None,
        negatives=inputs[3],
        **named_ids(pair_ids, own),
        **where,
    )
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-10, floor)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    **WORKERS,
    **CANDIDATES,
)
def test_the_loss_of_any_sizes_and_pair_ids_equals_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    num_negatives: int,
    num_ids: int,
    in_batch: bool,
    temperature: float,
    seed: int,
) -> None:
    """Negatives are compared with the pairs of all workers, with or without their keys."""
    own, total = slice(before, before + batch), before + batch + after
    pair_ids, negative_id = make_pair_ids(total, num_negatives, num_ids, seed)
    query, key = make_views(total, 5, seed=seed)
    compare_pairs_with_plain(
        query,
        key,
        temperature,
        make_rows(num_negatives, 5, seed),
        own=own,
        pair_ids=pair_ids,
        negative_id=negative_id,
        in_batch=in_batch,
        floor=1e-11 + 1e-14 / temperature**2,
    )


@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("own", (None, slice(300, 700)))
def test_the_loss_over_many_pieces_with_pair_ids_equals_the_plain_formula(
    own: slice | None, temperature: float
) -> None:
    pair_ids, negative_id = make_pair_ids(1100, 1030, 900)
    rows = *make_views(1100, 6), temperature, make_rows(1030, 6)
    compare_pairs_with_plain(*rows, own=own, pair_ids=pair_ids, negative_id=negative_id)


def test_sample_ids_equal_the_same_ids_for_queries_and_keys() -> None:
    inputs, queue = leaves(*make_views(300, 4)), make_rows(90, 4)
    ids = torch.arange(300) % 20
    shared = {"temperature": 0.1, "negatives": queue, "negative_id": torch.arange(90)}
    short = info_nce(*inputs, sample_id=ids, **shared)
    long = info_nce(*inputs, query_id=ids, key_id=ids.clone(), **shared)
    for one, other in zip(value_and_gradients(short, inputs), value_and_gradients(long, inputs), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("temperature", (0.1, 0.01))
def test_only_a_strip_of_keys_and_a_tile_of_the_queue_are_in_memory(temperature: float) -> None:
    inputs, queue = leaves(*make_views(600, 4)), make_rows(5000, 4)
    with MetricsLogger() as detached:
        info_nce(*inputs, temperature=temperature, negatives=queue, in_batch=False).backward()
    assert 0 < detached.largest <= max(256 * 1024, 5000 * 4)
    with MetricsLogger() as wanted:
        info_nce(*inputs, temperature=temperature, negatives=queue.requires_grad_()).backward()
    assert 0 < wanted.largest <= 256 * 5 * 1024


def test_only_products_needed_for_requested_gradients_are_computed() -> None:
    inputs = (*make_views(5, 4), torch.tensor(0.1), make_rows(3, 4))
    expected = {(): 2, (0,): 4, (1,): 3, (2,): 4, (3,): 3, (0, 2): 4, (0, 1): 5, (0, 1, 2, 3): 6}
    for wanted, num_products in expected.items():
        query, key, degrees, queue = wanting(inputs, wanted)
        loss = partial(info_nce, query, key, temperature=degrees, negatives=queue)
        assert count_products(loss, "softmax") == num_products, wanted


def test_the_loss_is_the_mean_over_the_queries() -> None:
    """All n equal candidates are equally likely: log n."""
    row = F.normalize(torch.ones(8, 4), dim=1)
    value = info_nce(row, row, temperature=0.5, negatives=row)
    assert value.item() == pytest.approx(torch.tensor(16.0).log().item(), rel=1e-6)
    assert "mean" in (info_nce.__doc__ or "")


ROWS = torch.eye(4)
IDS = torch.arange(4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 0.0}, "the temperature must be above 0, got 0; usual values"),
        (
            {"in_batch": False, "negatives": ROWS, "gathered_key": ROWS},
            "gathered_key [4, 4] with in_batch=False; remove gathered_key",
        ),
        (
            {"negatives": ROWS[:, :2]},
            "the negatives must be [rows, dim] with the dim of the queries, got [4, 2]",
        ),
        ({"gathered_key": ROWS[0]}, "gathered_key must be [batch, 4] of one batch, got [4]; gather"),
        ({"gathered_key": ROWS, "offset": 1}, "offset 1 with 4 rows for 4 gathered rows"),
        ({"gathered_key": ROWS, "sample_id": IDS}, "gathered_sample_id is None; pass both or neither"),
        ({"sample_id": IDS, "key_id": IDS}, "two kinds of ids: got sample_id with key_id; pass sample_id"),
        ({"gathered_key": ROWS, "query_id": IDS}, "gathered_query_id is None; pass both or neither"),
        ({"gathered_key_id": IDS, "key_id": IDS}, "gathered_key_id requires gathered_key"),
    ],
)
def test_invalid_input_is_refused_with_its_value_and_a_remedy(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": ROWS, "key": ROWS, "temperature": 0.1} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        info_nce(**arguments)
