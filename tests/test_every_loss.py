"""Common guarantees of all losses, each against its plain formula."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from raycl.errors import ConfigError
from raycl.losses import (
    NormalizingConstant,
    clip,
    dcl,
    gcl,
    hinge,
    info_nce,
    nce,
    noise_mass,
    nt_xent,
    poly_view,
    siglip,
    supcon,
    tiled,
)
from raycl.losses.example_ids import ExampleIds
from raycl.losses.info_nce import ring_info_nce
from raycl.losses.objective import StoreBatch, build_objective
from tests.embeddings import make_rows, make_views
from tests.gradients import assert_close, assert_zero, leaves, tolerance_at, value_and_gradients, wanting
from tests.plain_losses import WAYS, plain_bidirectional, plain_hinge, plain_info_nce, plain_nt_xent
from tests.tiles import MetricsLogger

pytestmark = pytest.mark.usefixtures("one_thread")

Loss = partial[Tensor]  # with its settings


def middle(rows: Tensor) -> slice:
    """Return the rows of a worker: the middle half of the batch."""
    return slice(len(rows) // 4, 3 * len(rows) // 4)


def worker_clip(query: Tensor, key: Tensor, **arguments: Any) -> Tensor:
    """Return the loss of one worker of several."""
    own = middle(query)
    arguments |= {"gathered_query": query, "gathered_key": key, "offset": own.start}
    return clip(query[own], key[own], **arguments)


def plain_worker_clip(query: Tensor, *others: Tensor) -> Tensor:
    return plain_bidirectional(query, *others, own=middle(query))


PLAIN: dict[Callable[..., Tensor], Callable[..., Tensor]] = {
    nt_xent: plain_nt_xent,
    info_nce: plain_info_nce,
    clip: plain_bidirectional,
    worker_clip: plain_worker_clip,
    hinge: plain_hinge,
}


def plain(loss: Loss) -> Loss:
    """Return the plain version of the loss with the same settings."""
    return partial(PLAIN[loss.func], **loss.keywords)


def hinges(margin: float) -> list[Loss]:
    """Return the hinge losses over all negatives and over the hardest one."""
    return [partial(hinge, margin=margin, hardest=hardest) for hardest in (False, True)]


def name_of(value: object) -> str | None:
    """Name a case by its loss and settings."""
    if not isinstance(value, partial):
        return None
    return "-".join([value.func.__name__, *(f"{name}={each}" for name, each in value.keywords.items())])


# Gradients


@pytest.mark.parametrize(
    "loss",
    [
        partial(nt_xent, temperature=0.1),
        partial(clip, temperature=0.1),
        partial(hinge, margin=0.5),
    ],
    ids=name_of,
)
def test_the_gradient_scales_with_the_loss_and_can_be_computed_twice(loss: Loss) -> None:
    inputs = leaves(*make_views(9, 4))
    value = loss(*inputs)
    once = torch.autograd.grad(value, inputs, retain_graph=True)
    tripled = torch.autograd.grad(3 * value, inputs)
    assert_close(list(tripled), [3 * gradient for gradient in once], 1e-6)


@pytest.mark.parametrize(
    "loss",
    [
        partial(nt_xent, temperature=0.1),
        partial(info_nce, temperature=0.1),
        partial(clip, temperature=0.1),
        partial(hinge, margin=0.5),
    ],
    ids=name_of,
)
def test_a_second_derivative_is_refused(loss: Loss) -> None:
    inputs = leaves(*make_views(9, 4))
    (gradient, _) = torch.autograd.grad(loss(*inputs), inputs, create_graph=True)
    with pytest.raises(RuntimeError):
        gradient.sum().backward()


BOTH_WAYS = partial(clip)
HINGES = [partial(hinge, margin=0.2, **ways) for ways in WAYS]


def inputs_of(loss: Loss) -> dict[str, Tensor]:
    """Return all differentiable inputs of the loss."""
    query, key = make_views(300, 4, noise=1.0 if loss.func is hinge else 0.3)
    degrees = {} if loss.func is hinge else {"temperature": torch.tensor(0.1)}
    return {"query": query, "key": key, **degrees, "negatives": make_rows(1100, 4)}


@pytest.mark.parametrize("loss", [partial(info_nce), BOTH_WAYS, *HINGES], ids=name_of)
def test_a_gradient_is_independent_of_other_requested_gradients(loss: Loss) -> None:
    names, inputs = zip(*inputs_of(loss).items(), strict=True)
    together = leaves(*inputs)
    _, *all_at_once = value_and_gradients(loss(**dict(zip(names, together, strict=True))), together)
    for k, expected in enumerate(all_at_once):
        mixed = wanting(inputs, {k})
        value = loss(**dict(zip(names, mixed, strict=True)))
        assert_close([torch.autograd.grad(value, mixed[k])[0]], [expected], 1e-6)


@pytest.mark.parametrize("loss", [BOTH_WAYS, *HINGES], ids=name_of)
def test_the_value_is_independent_of_the_requested_gradients(loss: Loss) -> None:
    names, inputs = zip(*inputs_of(loss).items(), strict=True)
    together = dict(zip(names, leaves(*inputs), strict=True))
    with torch.no_grad():
        bare = loss(**together)
    assert not bare.requires_grad
    assert torch.equal(bare, loss(**together))
    for k in range(len(inputs)):
        assert torch.equal(bare, loss(**dict(zip(names, wanting(inputs, {k}), strict=True))))


# Precision


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
@pytest.mark.parametrize(
    ("loss", "num_negatives"),
    [
        (partial(nt_xent, temperature=0.1), None),
        (partial(info_nce, temperature=0.1), 50),
        (partial(clip, temperature=0.1), 50),
        *((loss, None) for loss in hinges(0.4)),
    ],
    ids=name_of,
)
def test_half_precision_rows_lose_only_their_own_rounding(
    loss: Loss, num_negatives: int | None, dtype: torch.dtype
) -> None:
    half = leaves(*make_views(70, 6), dtype=dtype)
    queue = {} if num_negatives is None else {"negatives": make_rows(num_negatives, 6)}
    value = loss(*half, **queue)
    assert value.dtype == torch.float32
    exact = leaves(*half, dtype=torch.float64)
    exact_queue = {name: rows.double() for name, rows in queue.items()}
    true = value_and_gradients(plain(loss)(*exact, **exact_queue), exact)
    assert_close([value], true[:1], 1e-5)
    gradients = torch.autograd.grad(value, half)
    assert [gradient.dtype for gradient in gradients] == [dtype, dtype]
    assert_close(list(gradients), true[1:], 5e-3)


@pytest.mark.parametrize("dtype", (torch.float16, torch.bfloat16))
@pytest.mark.parametrize(
    ("loss", "tolerance"),
    [
        *(
            (partial(info_nce, temperature=degrees, in_batch=False), tolerance_at(degrees))
            for degrees in (0.07, 0.01)
        ),
        *((partial(clip, temperature=degrees), tolerance_at(degrees)) for degrees in (0.07, 0.01)),
        *((loss, 1e-5) for loss in hinges(0.3)),
    ],
    ids=name_of,
)
def test_a_half_precision_queue_loses_only_its_own_rounding(
    loss: Loss, tolerance: float, dtype: torch.dtype
) -> None:
    query, key = make_views(70, 6)
    queue = make_rows(3000, 6).to(dtype)
    exact = leaves(query, key, queue, dtype=torch.float64)
    true = value_and_gradients(plain(loss)(*exact[:2], negatives=exact[2]), exact)
    for wanted in (False, True):
        inputs = [*leaves(query, key), *([queue.clone().requires_grad_()] if wanted else [])]
        value = loss(*inputs[:2], negatives=inputs[2] if wanted else queue)
        results = value_and_gradients(value, inputs)
        assert_close(results[:3], true[:3], tolerance)
        if wanted:
            assert results[3].dtype == dtype
            assert_close(results[3:], true[3:], 2e-2)


def ring(query: Tensor, key: Tensor, *, negatives: Tensor) -> Tensor:
    """Return InfoNCE over a ring of one worker."""
    ids, names = torch.arange(len(query)), torch.arange(100, 100 + len(negatives))
    return ring_info_nce(query, key, ids, ids, temperature=0.1, negatives=negatives, negative_id=names)


@pytest.mark.parametrize(
    ("loss", "dim"),
    [
        (partial(info_nce, temperature=0.1, in_batch=False), 16),
        (partial(ring), 64),
        (partial(clip, temperature=0.1), 64),
        *((partial(loss, in_batch=False), 16) for loss in hinges(0.5)),
    ],
    ids=name_of,
)
def test_a_half_precision_queue_is_never_copied_in_full(loss: Loss, dim: int) -> None:
    query, key = leaves(*make_views(8, dim))
    queue = make_rows(20_000, dim).half()
    with MetricsLogger() as recorder:
        loss(query, key, negatives=queue).backward()
    assert 0 < recorder.largest <= 20_000 * dim // 2  # as many floats as the queue itself has bytes / 4


def gathered_nt_xent(view_a: Tensor, view_b: Tensor, *, temperature: float) -> Tensor:
    """Return NT-Xent of one worker with gathered rows."""
    return nt_xent(view_a, view_b, temperature=temperature, gathered_a=view_a, gathered_b=view_b)


@pytest.mark.parametrize("has_onednn", (True, False))
@pytest.mark.parametrize(
    "loss",
    [
        *(
            partial(loss, temperature=degrees)
            for loss in (nt_xent, gathered_nt_xent, info_nce, clip)
            for degrees in (0.1, 0.01)
        ),
        *hinges(0.3),
    ],
    ids=name_of,
)
def test_autocast_does_not_reduce_the_precision(
    loss: Loss, has_onednn: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without oneDNN the products use F.linear, which autocast would run in lower precision.
    monkeypatch.setattr(tiled, "_HAS_ONEDNN", has_onednn and tiled._HAS_ONEDNN)
    inputs = leaves(*make_views(70, 6))
    queue = {} if "nt_xent" in loss.func.__name__ else {"negatives": make_rows(90, 6)}
    without = loss(*inputs, **queue)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        within = loss(*inputs, **queue)
    assert within.dtype == torch.float32
    assert_close(value_and_gradients(within, inputs), value_and_gradients(without, inputs), 1e-6)


@pytest.mark.parametrize(
    "loss",
    [partial(info_nce, temperature=0.5), partial(clip, temperature=0.5)],
    ids=name_of,
)
def test_rows_of_any_norm_give_the_correct_value(loss: Loss) -> None:
    query, key = make_views(20, 4)
    negatives = make_rows(30, 4) * torch.logspace(-3, 2, 30)[:, None]
    exact = plain(loss)(query.double(), key.double(), negatives=negatives.double())
    assert_close([loss(query, key, negatives=negatives)], [exact], 1e-5)


@pytest.mark.parametrize("loss", [nt_xent, info_nce])
def test_no_weight_is_a_subnormal_number(loss: Callable[..., Tensor]) -> None:
    # At 0.01 and with nearly equal pairs, most weights are below 2**-126. Subnormal numbers are slow,
    # so these weights must be 0.
    smallest = torch.finfo(torch.float32).tiny
    seen: list[Tensor] = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = function(*args, **(kwargs or {}))
            if "exp2" in str(function):
                weights = kwargs["out"] if kwargs and "out" in kwargs else out
                seen.append(((weights > 0) & (weights < smallest)).sum())
            return out

    query = F.normalize(torch.randn(300, 64, generator=torch.Generator().manual_seed(0)), dim=1)
    key = F.normalize(query + 0.001 * torch.randn(300, 64, generator=torch.Generator().manual_seed(1)), dim=1)
    with Watch():
        loss(query.requires_grad_(), key, temperature=0.01)
    assert seen
    assert sum(seen) == 0


def compare_with_plain(loss: Loss, *inputs: Tensor, temperature: float) -> Tensor:
    """Compare the value and the gradients of queries, keys, temperature and negatives; return the value."""
    query, key, negatives, degrees = single = leaves(*inputs, torch.tensor(temperature))
    exact = leaves(*single, dtype=torch.float64)
    true = plain(loss)(*exact[:2], exact[3], exact[2])
    ours = loss(query, key, temperature=degrees, negatives=negatives)
    floor = 1e-15 / temperature**2  # of the plain formula, whose terms cancel
    expected = value_and_gradients(true, exact)
    assert_close(value_and_gradients(ours, single), expected, tolerance_at(temperature), floor)
    return true


WITH_QUEUE = [partial(info_nce, in_batch=False), partial(clip), partial(worker_clip)]


@pytest.mark.parametrize("temperature", (1.0, 0.2, 0.07, 0.03, 0.01, 0.005))
@pytest.mark.parametrize("loss", WITH_QUEUE, ids=name_of)
def test_unrelated_rows_do_not_overflow_or_underflow(loss: Loss, temperature: float) -> None:
    """The largest similarity is far below 1, so exp((similarity - 1) / 0.005) is zero."""
    inputs = *make_views(40, 128, noise=100.0), make_rows(1500, 128)
    assert compare_with_plain(loss, *inputs, temperature=temperature).isfinite()


@pytest.mark.parametrize("loss", WITH_QUEUE, ids=name_of)
def test_a_candidate_with_a_new_maximum_is_weighted_correctly(loss: Loss) -> None:
    """At a low temperature the shift must track the largest logit, here from piece to piece."""
    query, key = make_views(1100, 8, noise=100.0)
    nearer = F.normalize(torch.linspace(0.0, 1.0, 1100)[:, None] * query[0] + 0.1 * key, dim=1)
    for keys in (nearer, nearer.flip(0)):
        compare_with_plain(loss, query, keys, keys, temperature=0.01)
        compare_with_plain(loss, keys, query, keys, temperature=0.01)


@pytest.mark.parametrize("temperature", (0.1, 0.05))
@pytest.mark.parametrize("loss", WITH_QUEUE, ids=name_of)
def test_a_loss_near_zero_is_not_rounded_away(loss: Loss, temperature: float) -> None:
    key = torch.eye(40)
    value = compare_with_plain(loss, key[:30], key[:30], key[30:] + 1e-3, temperature=temperature)
    assert 0 < value < 1e-2


# Candidates

TEMPERATURE = {"temperature": 0.1}
COLD = {"temperature": 0.01}
ALL = [
    *(partial(loss, **heat) for heat in (TEMPERATURE, COLD) for loss in (nt_xent, info_nce, clip)),
    *(partial(hinge, margin=0.3, **ways) for ways in WAYS),
]
WITH_NEGATIVES = [loss for loss in ALL if loss.func is not nt_xent]


def labeled_supcon(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Return SupCon of ten classes."""
    return supcon(view_a, view_b, torch.arange(len(view_a)) % 10, temperature=0.1)


def three_views(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Return the loss of three views."""
    return poly_view([view_a, view_a, view_b], temperature=0.1)


def stored_gcl(view_a: Tensor, view_b: Tensor) -> Tensor:
    """Return the global loss with stored partition functions."""
    log = torch.zeros(len(view_a), 1)
    return gcl(view_a, view_b, log_partition=log, temperature=0.1, momentum=0.5, num_samples=9000)[0]


def nce_and_mass(query: Tensor, positive: Tensor) -> Tensor:
    """Return noise-contrastive estimation, after the estimate of its constant."""
    noise = make_rows(5000, 4)
    noise_mass(query, noise, temperature=0.1)
    return nce(query, positive.detach(), noise, num_samples=9, temperature=0.1, log_normalizer=9.0)


OTHERS = [
    partial(dcl, temperature=0.1),
    partial(dcl, temperature=0.1, sigma=0.5),
    partial(siglip, temperature=0.1, bias=-10.0),
    *map(partial, (labeled_supcon, three_views, stored_gcl)),
]


def ids_of(loss: Loss, ids: Tensor) -> dict[str, Tensor]:
    return {"query_id": ids, "key_id": ids} if loss.func is clip else {"sample_id": ids}


@pytest.mark.parametrize("loss", ALL, ids=name_of)
@pytest.mark.parametrize("batch", (1, 4))
def test_rows_with_all_candidates_masked_have_no_loss(batch: int, loss: Loss) -> None:
    inputs = leaves(*make_views(batch, 3))
    same: dict[str, Any] = ids_of(loss, torch.zeros(batch, dtype=torch.int64))
    if loss in WITH_NEGATIVES:
        same |= {"negatives": make_rows(4, 3), "negative_id": torch.zeros(4, dtype=torch.int64)}
    assert_zero(value_and_gradients(loss(*inputs, **same), inputs))


@pytest.mark.parametrize("loss", WITH_NEGATIVES, ids=name_of)
def test_an_empty_queue_changes_nothing(loss: Loss) -> None:
    inputs, empty = leaves(*make_views(4, 3)), torch.empty(0, 3)
    results = value_and_gradients(loss(*inputs, negatives=empty), inputs)
    assert_close(results, value_and_gradients(loss(*inputs), inputs), 1e-6)
    if loss.func is not clip and not loss.keywords.get("bidirectional"):
        alone = loss(*inputs, negatives=empty, in_batch=False)
        assert_zero(value_and_gradients(alone, inputs))


@pytest.mark.parametrize("loss", [*ALL, *OTHERS], ids=name_of)
@pytest.mark.parametrize("invalid", (torch.nan, torch.inf))
@pytest.mark.parametrize("place", (0, 1, 2))
def test_invalid_rows_give_a_loss_that_is_not_finite(place: int, invalid: float, loss: Loss) -> None:
    rows = [*make_views(9, 4), make_rows(12, 4)]
    rows[place][3, 1] = invalid
    negatives = {"negatives": rows[2]} if loss in WITH_NEGATIVES else {}
    if place < 2 or negatives:
        assert not loss(*rows[:2], **negatives).isfinite()


@pytest.mark.parametrize("loss", ALL, ids=name_of)
def test_no_matrix_of_all_pairs_is_allocated(loss: Loss) -> None:
    batch, dim, own = 4096, 16, slice(1024, 1300)
    inputs, ids = leaves(*make_views(batch, dim)), torch.arange(batch) % 4000
    with MetricsLogger() as alone:
        loss(*inputs, **(ids_of(loss, ids) if loss.func is clip else {})).backward()
    assert 0 < alone.largest <= 256 * (batch if loss.func is info_nce else 1024)
    sides = ("gathered_a", "gathered_b") if loss.func is nt_xent else ("gathered_query", "gathered_key")
    gathered: dict[str, Any] = dict(zip(sides, inputs, strict=True))
    if loss.func is info_nce or loss.keywords.get("bidirectional") is False:
        del gathered["gathered_query"]
    with MetricsLogger() as of_a_worker:
        loss(*(rows[own] for rows in inputs), **gathered, offset=own.start).backward()
    assert 0 < of_a_worker.largest <= 256 * batch * (2 if loss.func is nt_xent else 1)


@pytest.mark.parametrize("loss", [*OTHERS, partial(nce_and_mass)], ids=name_of)
def test_memory_holds_only_one_tile(loss: Loss) -> None:
    views = leaves(*make_views(2048, 4))
    with MetricsLogger() as recorder:
        loss(*views).backward()
    assert 0 < recorder.largest <= 256 * 1024


@pytest.mark.parametrize("loss", ALL, ids=name_of)
def test_distinct_ids_need_no_mask(loss: Loss) -> None:
    views, queue, ids = make_views(40, 4), make_rows(50, 4), torch.randperm(40)
    for sample_id, negative_id, masked in (
        (ids, torch.arange(40, 90), False),
        (ids, torch.arange(39, 89), loss in WITH_NEGATIVES),
        (ids % 39, torch.arange(40, 90), True),
    ):
        negatives = {"negatives": queue, "negative_id": negative_id} if loss in WITH_NEGATIVES else {}
        with MetricsLogger() as recorder:
            loss(*views, **ids_of(loss, sample_id), **negatives)
        assert ("masked_fill_" in recorder.functions) == masked
    with MetricsLogger() as recorder:
        loss(*views)
    assert not recorder.functions & {"sort", "argsort", "searchsorted", "masked_fill_"}


# Refusals


@pytest.mark.parametrize(
    ("loss", "names"),
    [
        (partial(nt_xent, temperature=0.1), ("gathered_a", "gathered_b")),
        (partial(info_nce, temperature=0.1), ("gathered_key",)),
        (partial(clip, temperature=0.1), ("gathered_query", "gathered_key")),
        (partial(hinge, margin=0.2), ("gathered_query", "gathered_key")),
        (partial(siglip, temperature=0.1, bias=-10.0), ("gathered_key",)),
    ],
    ids=name_of,
)
def test_gathered_rows_without_gradient_are_refused_if_one_is_required(
    loss: Loss, names: tuple[str, ...]
) -> None:
    own = leaves(*make_views(8, 3))
    everyone = dict(zip(names, own[-len(names) :], strict=True))
    for name, rows in everyone.items():
        lost = everyone | {name: rows.detach()}
        with pytest.raises(ConfigError, match=f"{name} passes no gradient on to this worker's rows, which"):
            loss(*own, **lost)
        with torch.no_grad():
            assert loss(*own, **lost).isfinite()
        # Keys of a momentum encoder require no gradient.
        loss(*(each.detach() if each is rows else each for each in own), **lost).backward()


ROWS = torch.eye(4)
IDS = torch.arange(4)
OF_PAIRS = [
    ({"key": ROWS[:3]}, "query and key must be [local_batch, dim] of the same shape, got [4, 4]"),
    ({"query": ROWS[:0], "key": ROWS[:0]}, "got [0, 4] and [0, 4]; pass one row"),
    ({"offset": -1}, "offset -1 with 4 rows for 4 gathered rows"),
]
OF_IDS = [
    ({"sample_id": torch.arange(5)}, "got [5] ids for 4 rows; pass one id per row"),
    ({"in_batch": False}, "in_batch is False and negatives is None; pass negatives ([0, dim]"),
    ({"negative_id": IDS}, "negative_id requires negatives, got only [4] values; pass both"),
    ({"gathered_sample_id": IDS}, "gathered_sample_id requires gathered_key"),
    ({"negatives": ROWS, "negative_id": IDS}, "sample_id is None; pass both or neither"),
    ({"negatives": ROWS, "sample_id": IDS}, "negative_id is None; pass both or neither"),
    ({"query_id": IDS[:3]}, "query_id does not match its rows: got [3] ids for 4 rows; pass one id"),
    ({"negatives": ROWS, "key_id": IDS}, "negative_id is None; pass both or neither"),
    (
        {"negatives": ROWS, "sample_id": IDS, "negative_id": IDS[:3]},
        "negative_id does not match its rows: got [3] ids for 4 rows",
    ),
]


@pytest.mark.parametrize(
    ("loss", "changes", "message"),
    [
        *((partial(info_nce, temperature=0.1), *each) for each in [*OF_PAIRS, *OF_IDS]),
        *((partial(hinge, margin=0.2), *each) for each in [*OF_PAIRS, *OF_IDS]),
        *((partial(clip, temperature=0.1), *each) for each in OF_PAIRS),
    ],
    ids=name_of,
)
def test_invalid_input_is_refused_with_its_value_and_a_remedy(
    loss: Loss, changes: dict[str, Any], message: str
) -> None:
    arguments = {"query": ROWS, "key": ROWS} | changes
    with pytest.raises(ConfigError, match=re.escape(message)):
        loss(**arguments)


# Collapse

EQUAL, QUEUE = torch.ones(16, 4) / 2, torch.ones(40, 4) / 2
OUTSIDE = {"in_batch": False, "learns_keys": False}


@pytest.mark.parametrize(
    ("loss", "hinge_weight", "settings", "queue"),
    [
        ("nt_xent", 0.0, {}, None),
        ("nt_xent", 0.3, {}, None),
        ("supcon", 0.0, {}, None),
        ("dcl", 0.0, {}, None),
        ("dclw", 0.0, {}, None),
        ("nnclr", 0.0, {}, QUEUE),
        ("info_nce", 0.0, {}, None),
        ("info_nce", 0.0, {}, QUEUE),
        ("info_nce", 0.0, OUTSIDE, QUEUE),
        ("info_nce", 0.3, OUTSIDE, QUEUE),
        ("clip", 0.0, {"pairs": True}, None),
        ("clip", 0.0, {"pairs": True}, QUEUE),
        ("clip", 0.3, {"pairs": True}, QUEUE),
        ("hinge", 0.0, {}, None),
        ("hinge", 0.0, OUTSIDE | {"hardest": True}, QUEUE),
    ],
)
def test_equal_embeddings_have_the_collapsed_loss(
    loss: str, hinge_weight: float, settings: dict[str, Any], queue: Tensor | None
) -> None:
    objective = build_objective(loss, hinge_weight=hinge_weight, temperature=0.1, margin=0.5, **settings)
    ids, names = torch.arange(16), None if queue is None else torch.arange(100, 140)
    stored = StoreBatch(negatives=queue, negative_id=names)
    found = objective(EQUAL, EQUAL, stored, ExampleIds(query=ids, key=ids, label=ids))
    assert found.item() == pytest.approx(objective.collapsed_loss(batch_size=16, stored=stored))


@pytest.mark.parametrize("hinge_weight", [0.0, 0.3])
@pytest.mark.parametrize(
    ("loss", "settings"),
    [
        ("nce", {}),
        ("siglip", {}),
        ("clip", {"log_frequency": torch.zeros_like}),
        ("clip", {"log_frequency": torch.zeros_like, "refines_logq": True}),
    ],
)
def test_the_collapsed_loss_is_unknown_if_it_depends_on_more_than_sizes(
    loss: str, settings: dict[str, Any], hinge_weight: float
) -> None:
    learned = {"normalizer": NormalizingConstant(40), "num_samples": 40} | settings
    objective = build_objective(loss, hinge_weight=hinge_weight, temperature=0.1, **learned)
    assert objective.collapsed_loss(batch_size=16, stored=StoreBatch(negatives=QUEUE)) is None
