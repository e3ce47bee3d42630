"""The tiled hinge loss against the plain formula in float64."""

import itertools
import re
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from raycl.errors import ConfigError
from raycl.losses import clip, hinge
from raycl.losses.false_negatives import FalseNegativeMask
from raycl.losses.tiled import read_scalars
from tests.embeddings import make_pair_ids, make_rows, make_views, named_ids
from tests.gradients import assert_close, assert_zero, leaves, value_and_gradients, wanting
from tests.plain_losses import WAYS, plain_hinge
from tests.tiles import MetricsLogger, count_products, tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {
    "batch": st.integers(1, 9),
    "before": st.integers(0, 7),
    "after": st.integers(0, 7),
    "dim": st.integers(1, 5),
    "num_negatives": st.integers(0, 12),
}
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "margin": st.sampled_from((0.01, 0.3, 1.0, 3.0)),
    "hardest": st.booleans(),
    "direction": st.sampled_from(("rows", "both", "negatives only")),
}
tiny_tiles = partial(tiny_tiles_in, "hinge", "softmax")


def compare_with_plain(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    dtype: torch.dtype = torch.float64,
    own: slice | None = None,
    batch_id: Tensor | None = None,
    negative_id: Tensor | None = None,
    **ways: Any,
) -> Tensor:
    """Compare the value and all gradients of one worker with the plain formula; return the value."""
    inputs = leaves(queries, keys, negatives, dtype=dtype)
    exact = leaves(*inputs, dtype=torch.float64)
    mine = slice(0, len(queries)) if own is None else own
    true = plain_hinge(*exact, own=mine, batch_id=batch_id, negative_id=negative_id, **ways)
    gathered = {}
    if own is not None:
        gathered = {"gathered_key": inputs[1], "offset": own.start, "gathered_sample_id": batch_id}
        if ways["bidirectional"]:
            gathered["gathered_query"] = inputs[0]
    ours = hinge(
        inputs[0][mine],
        inputs[1][mine],
        negatives=inputs[2],
        sample_id=None if batch_id is None else batch_id[mine],
        negative_id=negative_id,
        **gathered,
        **ways,
    )
    assert ours.dtype == dtype
    tolerance, floor = 1e-12, 1e-15
    if dtype == torch.float32:
        # Rounding may move a pair to the other side of the kink, which changes its entire gradient.
        tolerance, floor = 1e-5, 3 / (len(queries[mine]) * (len(keys) + len(negatives)))
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, exact), tolerance, floor)
    return true


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("margin", (0.1, 0.5, 3.0))
@pytest.mark.parametrize(
    ("batch", "dim", "num_negatives"), ((1, 3, 1), (3, 2, 7), (7, 5, 1025), (257, 9, 300), (515, 4, 0))
)
def test_the_value_and_all_gradients_equal_the_plain_formula(
    batch: int, dim: int, num_negatives: int, margin: float, ways: dict[str, Any]
) -> None:
    compare_with_plain(*make_views(batch, dim), make_rows(num_negatives, dim), margin=margin, **ways)


@pytest.mark.parametrize("ways", WAYS)
def test_single_precision_loses_only_its_rounding(ways: dict[str, Any]) -> None:
    views, negatives = make_views(257, 9), make_rows(300, 9)
    compare_with_plain(*views, negatives, dtype=torch.float32, margin=0.3, **ways)


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("own", (None, slice(200, 900)))
def test_the_loss_over_many_tiles_equals_the_plain_formula(own: slice | None, ways: dict[str, Any]) -> None:
    ids = {"batch_id": torch.arange(1100) % 900, "negative_id": torch.arange(1050) % 800}
    rows = *make_views(1100, 3), make_rows(1050, 3)
    assert compare_with_plain(*rows, own=own, margin=0.2, **ids, **ways) > 0.01


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    **SIZES,
    num_ids=st.none() | st.integers(1, 12),
    **KINDS,
    seed=st.integers(0, 10_000),
)
def test_the_loss_of_any_sizes_and_ids_equals_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    dim: int,
    num_negatives: int,
    num_ids: int | None,
    margin: float,
    hardest: bool,
    direction: str,
    seed: int,
) -> None:
    in_batch = direction != "negatives only"
    total = before + batch + after if in_batch else batch
    generator = torch.Generator().manual_seed(seed)
    ids = {}
    if num_ids is not None:
        ids["batch_id"] = torch.randint(num_ids, (total,), generator=generator)
        ids["negative_id"] = torch.randint(num_ids, (num_negatives,), generator=generator)
    with tiny_tiles():
        compare_with_plain(
            *make_views(total, dim, seed=seed, noise=1.0),
            make_rows(num_negatives, dim, seed),
            own=slice(before, before + batch) if in_batch else None,
            margin=margin,
            hardest=hardest,
            bidirectional=direction == "both",
            in_batch=in_batch,
            **ids,
        )


def test_all_negatives_count_by_default_in_both_directions_with_in_batch_negatives() -> None:
    query, key, negatives = *make_views(20, 5), make_rows(9, 5)
    plain = plain_hinge(query, key, margin=0.3, hardest=False, bidirectional=True)
    assert_close([hinge(query, key, margin=0.3)], [plain], 1e-6)
    alone = hinge(query, key, margin=0.3, in_batch=False, negatives=negatives)
    rows_only = hinge(query, key, margin=0.3, in_batch=False, bidirectional=False, negatives=negatives)
    assert torch.equal(alone, rows_only)
    assert alone != hinge(query, key, margin=0.3, negatives=negatives)


def compare_pairs_with_plain(
    queries: Tensor,
    keys: Tensor,
    negatives: Tensor,
    *,
    own: slice | None,
    pair_ids: tuple[Tensor, Tensor],
    negative_id: Tensor,
    in_batch: bool = True,
    bidirectional: bool = True,
    left_out: str | None = None,
    **ways: Any,
) -> Tensor:
    """Compare the value and all gradients with pair ids with the plain formula; return the value.

    ``left_out`` names the omitted ids; all rows of that type are distinct then.
    """
    ways |= {"bidirectional": bidirectional, "in_batch": in_batch}
    inputs = leaves(queries, keys, negatives, dtype=torch.float64)
    mine = slice(0, len(queries)) if own is None else own
    companions: dict[str, Any] = named_ids(pair_ids, own) | {"negative_id": negative_id}
    of_others, different = negative_id, torch.arange(len(queries))
    if left_out == "query_id":
        pair_ids = different, pair_ids[1]
    elif left_out == "key_id":
        pair_ids, of_others = (pair_ids[0], different), torch.full_like(negative_id, -1)
        del companions["negative_id"]
    for name in (left_out, f"gathered_{left_out}"):
        companions.pop(name, None)
    if own is not None and in_batch:
        companions |= {"gathered_key": inputs[1]} | ({"gathered_query": inputs[0]} if bidirectional else {})
    true = plain_hinge(*inputs, own=mine, pair_ids=pair_ids, negative_id=of_others, **ways)
    ours = hinge(
        *(rows[mine] for rows in inputs[:2]), negatives=inputs[2], offset=mine.start, **companions, **ways
    )
    assert_close(value_and_gradients(ours, inputs), value_and_gradients(true, inputs), 1e-10)
    return true


@pytest.mark.parametrize("ways", WAYS)
@pytest.mark.parametrize("own", (None, slice(300, 570)))
def test_the_loss_over_many_tiles_with_pair_ids_equals_the_plain_formula(
    own: slice | None, ways: dict[str, Any]
) -> None:
    pair_ids, negative_id = make_pair_ids(600, 1050, 500)
    rows = *make_views(600, 3), make_rows(1050, 3)
    value = compare_pairs_with_plain(
        *rows, own=own, pair_ids=pair_ids, negative_id=negative_id, margin=0.2, **ways
    )
    assert value > 0.01


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    **SIZES,
    num_ids=st.integers(1, 12),
    **KINDS,
    left_out=st.none() | st.sampled_from(("query_id", "key_id")),
    seed=st.integers(0, 10_000),
)
def test_the_loss_of_any_sizes_and_pair_ids_equals_the_plain_formula(
    batch: int,
    before: int,
    after: int,
    dim: int,
    num_negatives: int,
    num_ids: int,
    margin: float,
    hardest: bool,
    direction: str,
    left_out: str | None,
    seed: int,
) -> None:
    """With gathered ids, stored negatives are compared with the pairs of all workers."""
    total = before + batch + after
    pair_ids, negative_id = make_pair_ids(total, num_negatives, num_ids, seed)
    with tiny_tiles():
        compare_pairs_with_plain(
            *make_views(total, dim, seed=seed, noise=1.0),
            make_rows(num_negatives, dim, seed),
            own=slice(before, before + batch),
            pair_ids=pair_ids,
            negative_id=negative_id,
            margin=margin,
            hardest=hardest,
            bidirectional=direction == "both",
            in_batch=direction != "negatives only",
            left_out=left_out,
        )


def negatives_of_each_pair(loss: Any, *, query_id: Tensor, key_id: Tensor, negative_id: Tensor) -> Tensor:
    """Return the keys, negatives and queries that each pair pushes away, [batch, num_candidates]."""
    batch = len(key_id)
    inputs = leaves(torch.eye(batch), torch.eye(batch), torch.eye(batch)[: len(negative_id)])
    pushed = []
    for k in range(batch):
        own = slice(k, k + 1)
        alone = loss(
            inputs[0][own],
            inputs[1][own],
            gathered_query=inputs[0],
            gathered_key=inputs[1],
            offset=k,
            **named_ids((query_id, key_id), own),
            negatives=inputs[2],
            negative_id=negative_id,
        )
        at_queries, at_keys, at_negatives = torch.autograd.grad(alone, inputs)
        pushed.append(torch.cat([at_keys, at_negatives, at_queries])[:, k] > 0)
    return torch.stack(pushed)


def test_the_hinge_masks_the_same_candidates_as_the_cross_entropy() -> None:
    for seed in range(4):
        (query_id, key_id), negative_id = make_pair_ids(14, 9, 8, seed)
        ids = {"query_id": query_id, "key_id": key_id, "negative_id": negative_id}
        ours = negatives_of_each_pair(partial(hinge, margin=3.0), **ids)
        theirs = negatives_of_each_pair(partial(clip, temperature=1.0), **ids)
        assert torch.equal(ours, theirs)
        assert 0.1 < ours.double().mean() < 0.9


def test_the_loss_is_the_mean_over_negatives_then_rows_then_directions() -> None:
    """Computed by hand: similarities [[1, .5, 0], [0, 1, 0], [.75, 0, .5]], and the margin is 1."""
    query = torch.tensor([[1.0, 0.5, 0.0], [0.0, 1.0, 0.0], [0.75, 0.0, 0.5]])
    key = torch.eye(3)
    expected = {
        (False, False): ((0.5 + 0) / 2 + 0 + (1.25 + 0.5) / 2) / 3,
        (True, False): (0.5 + 0 + 1.25) / 3,
        (False, True): ((0.25 + 0.875) / 3 + ((0 + 0.75) / 2 + (0.5 + 0) / 2 + (0.5 + 0.5) / 2) / 3) / 2,
        (True, True): ((0.5 + 1.25) / 3 + (0.75 + 0.5 + 0.5) / 3) / 2,
    }
    for (hardest, bidirectional), value in expected.items():
        ours = hinge(query, key, margin=1.0, hardest=hardest, bidirectional=bidirectional)
        assert ours.item() == pytest.approx(value, rel=1e-6)
    assert "**half** the sum" in (hinge.__doc__ or "")


def test_masked_candidates_are_excluded_from_the_mean() -> None:
    query = key = torch.eye(4)
    # Each violation is 0.5 for any number of averaged negatives.
    for ids in ([0, 1, 2, 3], [0, 0, 2, 3], [0, 1, 1, 1]):
        sample_id = torch.tensor(ids)
        assert hinge(query, key, margin=1.5, sample_id=sample_id).item() == pytest.approx(0.5)
    # A query with two keys and a key with three queries: the directions have different counts.
    for query_id, key_id in (
        ([0, 0, 2, 3], [0, 1, 2, 3]),
        ([0, 1, 2, 3], [0, 0, 0, 3]),
        ([0, 0, 2, 3], [0, 1, 1, 3]),
    ):
        ids = {"query_id": torch.tensor(query_id), "key_id": torch.tensor(key_id)}
        assert hinge(query, key, margin=1.5, **ids).item() == pytest.approx(0.5)
        others = {"negatives": torch.zeros(3, 4), "negative_id": torch.tensor([0, 1, 9])}
        assert hinge(query, key, margin=1.5, **ids, **others).item() == pytest.approx(0.5)


@pytest.mark.parametrize("hardest", (False, True))
def test_the_gradient_is_zero_for_a_negative_exactly_at_the_margin(hardest: bool) -> None:
    inputs = leaves(torch.eye(4), torch.eye(4), torch.eye(4)[:0])
    loss = hinge(*inputs[:2], margin=1.0, hardest=hardest, negatives=inputs[2])
    assert_zero(value_and_gradients(loss, inputs))


def hardest_of_equals(num_keys: int, num_negatives: int, first: int) -> tuple[list[int], list[int]]:
    """Return the keys and negatives pushed away by a query with equal similarity to all from ``first``."""
    near = torch.tensor([0.5, 0.0])
    keys = torch.where(torch.arange(num_keys)[:, None] >= first, near, -near)
    keys[0] = torch.tensor([0.25, 1.0])
    inputs = leaves(torch.tensor([[1.0, 0.0]]), keys, near.repeat(num_negatives, 1))
    loss = hinge(
        inputs[0],
        inputs[1][:1].detach(),
        margin=1.0,
        hardest=True,
        bidirectional=False,
        gathered_key=inputs[1],
        negatives=inputs[2],
    )
    _, _, at_keys, at_negatives = value_and_gradients(loss, inputs)
    pushed = at_keys[1:, 0].nonzero()[:, 0] + 1
    return pushed.tolist(), at_negatives[:, 0].nonzero()[:, 0].tolist()


def test_only_the_first_of_equally_hard_candidates_is_pushed_away() -> None:
    with tiny_tiles():
        assert hardest_of_equals(30, 5, first=3) == ([3], [])
        assert hardest_of_equals(30, 5, first=29) == ([29], [])
        assert hardest_of_equals(30, 12, first=30) == ([], [0])
    assert hardest_of_equals(3000, 5, first=1023) == ([1023], [])
    assert hardest_of_equals(3000, 2000, first=3000) == ([], [0])


def test_only_the_first_of_equally_hard_queries_is_pushed_away() -> None:
    inputs = leaves(torch.eye(2).repeat(8, 1), torch.eye(2).repeat(8, 1))
    ways = {"margin": 0.5, "hardest": True, "sample_id": torch.arange(16)}
    with tiny_tiles():
        both = value_and_gradients(hinge(*inputs, **ways), inputs)
        rows = value_and_gradients(hinge(*inputs, bidirectional=False, **ways), inputs)
    # Pairs alternate between two types of equal rows; the hardest is the first of the other type.
    pushes = torch.tensor([7.0, 1.0, *[0.0] * 6]) - 1
    assert torch.equal(rows[2], (pushes[:, None, None] * torch.eye(2)).view(16, 2) / 16)
    columns = [2 * each - other for each, other in zip(both, rows, strict=True)]
    assert columns[0] == rows[0] == 0.5
    assert torch.equal(columns[1], rows[2])
    assert torch.equal(columns[2], rows[1])


def test_long_rows_and_a_large_margin_give_the_correct_value() -> None:
    query, key = make_views(300, 4)
    lengths = torch.logspace(-3, 2, 300)[:, None]
    for ways in WAYS:
        compare_with_plain(query * lengths, key, make_rows(30, 4) * 9, margin=40.0, **ways)


def test_only_products_needed_for_requested_gradients_are_computed() -> None:
    """One tile of keys and one of negatives, used in both directions."""
    inputs = (*make_views(5, 4), make_rows(3, 4))
    expected = {(): 2, (0,): 4, (1,): 3, (2,): 3, (0, 1): 5, (1, 2): 4, (0, 1, 2): 6}
    for (wanted, num_products), hardest in itertools.product(expected.items(), (False, True)):
        query, key, queue = wanting(inputs, wanted)
        loss = partial(hinge, query, key, margin=0.3, hardest=hardest, negatives=queue)
        assert count_products(loss, "hinge", "softmax") == (2 if hardest else num_products), wanted


def test_only_blocks_with_false_negatives_take_an_extra_pass() -> None:
    query_id, key_id = torch.arange(600), torch.arange(600)
    # Queries 3 and 500 are equal, and so are keys 7 and 300.
    query_id[3], key_id[7] = 500, 300
    blocks, whole = [slice(0, 256), slice(256, 400), slice(400, 450)], slice(0, 600)
    mask = FalseNegativeMask((query_id, key_id), query_id, key_id, row_blocks=blocks, num_own=1)
    read_scalars(masks=(mask,))
    tile = torch.zeros(256, 600)
    mask.apply_(tile, blocks[0], whole)
    others = tile.fill_diagonal_(0).isinf().nonzero().tolist()
    assert others == [[3, 500], [7, 300]]
    with MetricsLogger() as recorder:
        mask.apply_(torch.zeros(50, 600), blocks[2], whole)
    assert "masked_fill_" not in recorder.functions


ROWS = torch.eye(4)
IDS = torch.arange(4)
BOTH = {"gathered_query": ROWS, "gathered_key": ROWS}
ALONE = {"in_batch": False, "negatives": ROWS, "query_id": IDS, "key_id": IDS, "negative_id": IDS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"margin": 0.0}, "the margin must be a finite number above 0, got 0; usual values"),
        ({"margin": -0.5}, "the margin must be a finite number above 0, got -0.5; usual values"),
        ({"margin": torch.nan}, "the margin must be a finite number above 0, got nan"),
        ({"margin": torch.inf}, "the margin must be a finite number above 0, got inf"),
        (
            {"in_batch": False, "negatives": ROWS, "bidirectional": True},
            "bidirectional is True and in_batch is False; remove bidirectional",
        ),
        (
            {"in_batch": False, "negatives": ROWS, "gathered_key": ROWS},
            "got gathered_key [4, 4] with in_batch=False and bidirectional=False; remove gathered_key",
        ),
        (
            BOTH | {"bidirectional": False},
            "got gathered_query [4, 4] with in_batch=True and bidirectional=False; remove gathered_query",
        ),
        ({"gathered_key": ROWS}, "only one side is gathered: gathered_query is None; gather both"),
        ({"gathered_query": ROWS}, "only one side is gathered: gathered_key is None; gather both"),
        (
            BOTH | {"gathered_key": torch.cat([ROWS, ROWS])},
            "gathered_query and gathered_key must be [batch, 4] of one batch, got [4, 4] and [8, 4]; gather",
        ),
        ({"negatives": ROWS[:, :2]}, "the negatives must be [rows, dim] with the dim of the queries"),
        (BOTH | {"gathered_key": ROWS[0]}, "must be [batch, 4] of one batch, got [4, 4] and [4]; gather"),
        (BOTH | {"gathered_query": ROWS[:, :2]}, "must be [batch, 4] of one batch, got [4, 2] and [4, 4]"),
        (
            ALONE | {"gathered_query_id": IDS, "gathered_key_id": torch.arange(8)},
            "gathered_key_id does not match its rows: got [8] ids for 4 rows",
        ),
        (ALONE | {"gathered_query_id": IDS}, "gathered_key_id is None; pass both or neither"),
        (
            ALONE | {"gathered_query_id": IDS, "gathered_key_id": IDS, "offset": 1},
            "offset 1 with 4 rows for 4 gathered rows",
        ),
    ],
)
def test_invalid_input_is_refused_with_its_value_and_a_remedy(changes: dict[str, Any], message: str) -> None:
    arguments = {"query": ROWS, "key": ROWS, "margin": 0.2} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        hinge(**arguments)
