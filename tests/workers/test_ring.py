"""Losses over a ring of real workers against the same losses over gathered rows."""

import contextlib
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from raycl.distributed import RingTransfer, all_sum, collectives, gather_detached, use_shared_memory
from raycl.errors import ConfigError
from raycl.losses import clip, info_nce, nt_xent
from raycl.losses.clip import Clip, ring_clip
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.info_nce import InfoNce, ring_info_nce
from raycl.losses.nt_xent import NtXent
from raycl.losses.objective import Objective, StoreBatch
from raycl.losses.siglip import SigLip, ring_siglip
from raycl.losses.views import GatheredViews, ViewBatch, check_views, softmax_of_views
from tests.gradients import assert_close
from tests.tiles import tiny_tiles_in
from tests.workers.processes import run_workers

WORKERS = (1, 2, 3, 4)
DIM, LOCAL, NUM_NEGATIVES, BIAS = 5, 7, 11, -2.0
Case = dict[str, Any]


def unit_rows(num_rows: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(num_rows, DIM, generator=generator, dtype=torch.float64), dim=1)


def make_inputs(rank: int, case: Case) -> tuple[list[Tensor], Tensor, Tensor]:
    """Return query, key, temperature and negatives, then the ids of the queries and of the negatives."""
    query = unit_rows(LOCAL, rank)
    key = F.normalize(query + 0.3 * unit_rows(LOCAL, 100 + rank), dim=1)
    query, key = (case.get("growth", 1.0) ** rank * each for each in (query, key))
    rows = [query, key, torch.tensor(case.get("temperature", 0.2)), unit_rows(NUM_NEGATIVES, 50)]
    rows[3] *= case.get("length", 1.0)
    types = [case.get("dtype", torch.float64)] * 4
    types[2] = torch.promote_types(types[0], torch.float32)
    types[3] = case.get("negatives_dtype", types[3])
    wanted = case.get("wanted", (True,) * 4)
    inputs = [
        each.detach().to(dtype).requires_grad_(wants)
        for each, dtype, wants in zip(rows, types, wanted, strict=True)
    ]
    # Samples repeat across workers, and for small moduli also within a worker.
    sample_id = (torch.arange(LOCAL) + rank * LOCAL) % case.get("num_ids", 10)
    return inputs, sample_id, torch.arange(NUM_NEGATIVES) * 2


def results(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    """Return the loss, and the gradients of twice the loss for inputs that require one."""
    wanted = [each for each in inputs if each.requires_grad]
    return [loss.detach(), *(torch.autograd.grad(2 * loss, wanted) if wanted else ())]


def ring_nt_xent(view_a: Tensor, view_b: Tensor, sample_id: Tensor, *, temperature: float | Tensor) -> Tensor:
    """Return NT-Xent by a ring of any number of workers."""
    views = view_a, view_b
    check_views(views, "sample_id", sample_id)
    gathered = GatheredViews(None, gather_detached(sample_id), collectives.rank() * len(sample_id))
    return softmax_of_views(ViewBatch(views, sample_id, gathered), temperature=temperature)


def objective(loss: str, temperature: Tensor) -> Objective:
    settings: dict[str, Any] = {"temperature": temperature}
    return {
        "nt_xent": lambda: NtXent(**settings),
        "info_nce": lambda: InfoNce(in_batch=True, **settings),
        "info_nce of pairs": lambda: InfoNce(in_batch=True, pairs=True, **settings),
        "clip": lambda: Clip(**settings),
        "clip alone": lambda: Clip(**settings),
        "siglip": lambda: SigLip(bias=torch.tensor(BIAS).to(temperature), **settings),
    }[loss]()


def by_ring_and_gathered(
    rank: int, num_workers: int, loss: str, case: Case
) -> tuple[list[Tensor], list[Tensor]]:
    answers = []
    for limit in (0, 2**60):
        (query, key, temperature, negatives), query_id, negative_id = make_inputs(rank, case)
        key_id = query_id if loss in ("nt_xent", "info_nce") else query_id // 2
        stored, inputs = StoreBatch(), [query, key, temperature]
        if loss not in WITHOUT_NEGATIVES and case.get("negatives", True):
            stored = StoreBatch(negatives=negatives, negative_id=negative_id)
            inputs.append(negatives)
        shared = use_shared_memory() if case.get("shared") else contextlib.nullcontext()
        with (
            tiny_tiles_in("softmax", "clip", "ring", "siglip"),
            shared,
            patch.object(collectives, "MAX_GATHERED_BYTES", limit),
        ):
            value = objective(loss, temperature)(query, key, stored, ExampleIds(query=query_id, key=key_id))
            found = results(value, inputs)
            if loss == "clip alone":  # only the mean of the temperature's gradient is the same
                found[1:] = [each if each.ndim else all_sum(each) / num_workers for each in found[1:]]
            answers.append(found)
    return answers[0], answers[1]


WITHOUT_NEGATIVES = ("nt_xent", "clip alone", "siglip")
LOSSES = ("nt_xent", "info_nce", "info_nce of pairs", "clip", "clip alone", "siglip")


def compare(loss: str, num_workers: int, tolerance: float = 1e-10, **case: Any) -> float:
    """Compare the ring's results on every worker with the gathered results; return the mean value."""
    answers = run_workers(by_ring_and_gathered, num_workers, loss, case)
    for ours, gathered in answers:
        assert [each.dtype for each in ours] == [each.dtype for each in gathered]
        assert_close(ours, gathered, tolerance, 1e-14)
    return sum(ours[0].item() for ours, _ in answers) / num_workers


@pytest.mark.parametrize("num_workers", WORKERS)
@pytest.mark.parametrize("temperature", (0.2, 0.01))
@pytest.mark.parametrize("loss", LOSSES)
def test_value_and_all_gradients_equal_the_loss_over_gathered_rows(
    loss: str, temperature: float, num_workers: int
) -> None:
    compare(loss, num_workers, temperature=temperature)
    compare(
        loss, num_workers, 1e-5 if temperature > 0.1 else 3e-4, temperature=temperature, dtype=torch.float32
    )


@pytest.mark.parametrize("loss", LOSSES)
def test_false_negatives_are_masked_on_the_same_worker_and_on_others(loss: str) -> None:
    # Distinct ids; ids that are distinct on each worker; ids that repeat on a worker.
    distinct, shared, doubled = (compare(loss, 3, num_ids=num_ids) for num_ids in (1_000, 17, 5))
    assert distinct > shared > doubled


@pytest.mark.parametrize("loss", LOSSES)
def test_shared_memory_does_not_change_the_results(loss: str) -> None:
    compare(loss, 3, shared=True)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("num_workers", (1, 3))
def test_half_precision_adds_only_its_own_rounding(num_workers: int, loss: str) -> None:
    # Gathered rows round the gradient of every worker; the ring rounds only their sum.
    compare(loss, num_workers, 1e-2, dtype=torch.bfloat16)


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_of_any_length_on_any_worker_neither_overflow_nor_underflow(loss: str) -> None:
    """A worker's own rows do not determine how large its logits become."""
    compare(loss, 3, 1e-6, growth=100.0, temperature=5.0)
    compare(loss, 3, 1e-6, growth=0.01, length=1e4, temperature=5.0)


def test_keys_of_other_workers_are_the_only_candidates_without_negatives() -> None:
    compare("info_nce", 3, negatives=False)


def test_a_queue_in_half_precision_is_used_without_conversion() -> None:
    wanted = (True, True, True, False)
    compare("info_nce", 2, 1e-5, dtype=torch.float32, negatives_dtype=torch.float16, wanted=wanted)


@pytest.mark.parametrize(
    "wanted",
    [
        (True, False, False, False),
        (False, True, False, False),
        (False, False, True, False),
        (False, False, False, True),
    ],
)
def test_a_gradient_does_not_depend_on_which_other_inputs_need_one(wanted: tuple[bool, ...]) -> None:
    compare("info_nce", 2, wanted=wanted)
    compare("clip", 2, wanted=wanted)
    if any(wanted[:3]):
        compare("nt_xent", 2, wanted=wanted)
        compare("clip alone", 2, wanted=wanted)


def count_passes(rank: int, num_workers: int, loss: Any, wanted: tuple[bool, ...]) -> int:
    (query, key, temperature, _), sample_id, _ = make_inputs(rank, {"wanted": wanted})
    with patch.object(collectives, "RingTransfer", wraps=RingTransfer) as passes:
        loss(query, key, sample_id, sample_id, temperature=temperature)
    return passes.call_count


def test_rows_are_sent_for_the_gradient_of_keys_only_if_it_is_needed() -> None:
    siglip = partial(ring_siglip, bias=BIAS)
    assert run_workers(count_passes, 4, siglip, (True, False, True, False)) == [3] * 4
    assert run_workers(count_passes, 4, siglip, (True, True, True, False)) == [3 + 4] * 4
    assert run_workers(count_passes, 4, ring_info_nce, (False, False, False, False)) == [3] * 4
    assert run_workers(count_passes, 4, ring_info_nce, (True, False, True, False)) == [3] * 4
    assert run_workers(count_passes, 4, ring_info_nce, (True, True, True, False)) == [6 + 4] * 4


@pytest.mark.parametrize(
    ("wanted", "num_rounds", "num_gradients"),
    [
        ((False, False, False, False), 1, 0),
        ((True, False, False, False), 2, 0),
        ((False, True, False, False), 2, 4),
        ((False, False, True, False), 2, 0),
        ((True, True, True, False), 2, 4),
    ],
)
def test_clip_passes_keys_once_for_the_value_and_once_for_gradients(
    wanted: tuple[bool, ...], num_rounds: int, num_gradients: int
) -> None:
    assert run_workers(count_passes, 4, ring_clip, wanted) == [3 * num_rounds + num_gradients] * 4


def gradients_without_rank_0(rank: int, num_workers: int) -> tuple[list[Tensor], list[Tensor]]:
    unwilling = {"wanted": (False,) * 4} if rank == 0 else {}
    inputs, sample_id, _ = make_inputs(rank, unwilling)
    ours = results(ring_nt_xent(inputs[0], inputs[1], sample_id, temperature=inputs[2]), inputs[:3])
    return ours, by_ring_and_gathered(rank, num_workers, "nt_xent", {})[1]


def test_a_worker_without_gradients_blocks_no_other_worker() -> None:
    (ours, _), *others = run_workers(gradients_without_rank_0, 3)
    assert len(ours) == 1
    for theirs, gathered in others:
        assert_close(theirs, gathered, 1e-10)


def loss_of_a_different_rank_0(
    rank: int, num_workers: int, ring: Any, name: str, wanted: list[tuple[bool, ...]]
) -> tuple[list[Tensor], list[Tensor]]:
    """Return the loss and the gradients of rows, by ring and gathered; ``wanted`` are those of rank 0 and of others."""
    case = {"wanted": wanted[min(rank, 1)]}
    (query, key, temperature, _), query_id, _ = make_inputs(rank, case)
    loss = ring(query, key, query_id, query_id // 2, temperature=temperature)
    ours = results(loss, [query, key])
    value, *gradients = by_ring_and_gathered(rank, num_workers, name, {})[1]
    return ours, [value, *(each for each, wants in zip(gradients, case["wanted"][:2], strict=False) if wants)]


@pytest.mark.parametrize(
    "of_rank_0", [(False,) * 4, (True, False, False, False), (False, True, False, False)]
)
@pytest.mark.parametrize("is_reversed", (False, True))
@pytest.mark.parametrize(
    ("ring", "name"), [(ring_clip, "clip alone"), (partial(ring_siglip, bias=BIAS), "siglip")]
)
def test_workers_may_need_different_gradients(
    ring: Any, name: str, of_rank_0: tuple[bool, ...], is_reversed: bool
) -> None:
    wanted = [of_rank_0, (True, True, True, False)]
    wanted = wanted[::-1] if is_reversed else wanted
    for ours, gathered in run_workers(loss_of_a_different_rank_0, 3, ring, name, wanted):
        assert_close(ours, gathered, 1e-10)


def counts_of_a_guide(rank: int, num_workers: int, loss: str) -> list[list[int]]:
    """Return the counts of a guide, by ring and gathered."""
    counts = []
    for limit in (0, 2**60):
        (query, key, temperature, _), query_id, _ = make_inputs(rank, {})
        guide = Guide.of(unit_rows(LOCAL, 200 + rank), unit_rows(LOCAL, 300 + rank)).gathered([])
        stored, ids = StoreBatch(guide=guide), ExampleIds(query=query_id, key=query_id // 2)
        with patch.object(collectives, "MAX_GATHERED_BYTES", limit):
            objective(loss, temperature)(query, key, stored, ids).backward()
        assert guide.counts is not None
        counts.append(guide.counts.tolist())
    return counts


@pytest.mark.parametrize("loss", ("info_nce of pairs", "clip"))
def test_a_guide_counts_each_candidate_once_although_it_visits_twice(loss: str) -> None:
    for by_ring, gathered in run_workers(counts_of_a_guide, 3, loss):
        assert by_ring == gathered
        assert 0 < by_ring[0] < by_ring[1]


class TensorMemory(TorchDispatchMode):
    """Records the largest tensor, and the peak memory of all tensors created here."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = self.most = 0
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for each in tree_leaves(made):
            if isinstance(each, Tensor):
                storage = each.untyped_storage()
                self._storages[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
                self.largest = max(self.largest, storage.nbytes())
        self._storages = {key: each for key, each in self._storages.items() if not each[0].expired()}
        self.most = max(self.most, sum(size for _, size in self._storages.values()))
        return made


def memory_of_a_loss(rank: int, num_workers: int, loss: str, by_ring: bool) -> tuple[int, int]:
    """Return the bytes of the largest tensor and the peak of all tensors, for 64 rows of 2 KB per view."""
    view_a, view_b = torch.randn(2, 64, 512).unbind()
    view_a, view_b = view_a.clone().requires_grad_(), view_b.clone().requires_grad_()
    with TensorMemory() as alive:
        ids = torch.arange(64) + 64 * rank
        with patch.object(collectives, "MAX_GATHERED_BYTES", 0 if by_ring else 2**60):
            compared = objective(loss, torch.tensor(10.0))
            compared(view_a, view_b, StoreBatch(), ExampleIds(query=ids, key=ids)).backward()
    return alive.largest, alive.most


@pytest.mark.parametrize(("loss", "views_together"), [("nt_xent", 2), ("clip alone", 1)])
def test_no_worker_ever_holds_the_rows_of_all_workers(loss: str, views_together: int) -> None:
    own = views_together * 64 * 512 * 4
    with_three, with_four = (run_workers(memory_of_a_loss, count, loss, True)[0] for count in (3, 4))
    largest_gathered, most_gathered = run_workers(memory_of_a_loss, 4, loss, False)[0]
    assert with_four[0] == own < largest_gathered
    # Only ids and similar small tensors may grow.
    assert with_four[1] == pytest.approx(with_three[1], rel=0.01)
    assert with_four[1] < most_gathered / 2


def row_with_nan(rank: int, num_workers: int) -> list[bool]:
    inputs, sample_id, _ = make_inputs(rank, {})
    rows = [each.detach() for each in inputs]
    if rank == 1:
        rows[1][3, 0] = torch.nan
    losses = [
        ring_nt_xent(rows[0], rows[1], sample_id, temperature=0.1),
        ring_info_nce(rows[0], rows[1], sample_id, sample_id, temperature=0.1),
        ring_clip(rows[0], rows[1], sample_id, sample_id, temperature=0.1),
    ]
    return [bool(loss.isnan()) for loss in losses]


def test_a_row_with_nan_gives_nan_on_every_worker() -> None:
    assert run_workers(row_with_nan, 3) == [[True] * 3] * 3


def pass_many(rank: int, num_workers: int) -> list[list[Any]]:
    big = torch.full((300_000,), float(rank), requires_grad=True)
    sent = (
        big,
        torch.tensor([[rank, 2**62], [rank, 7]]).T,
        torch.tensor(rank > 0),
        big.detach()[:3].bfloat16(),
    )
    answers = []
    for _ in range(num_workers):
        passing = RingTransfer(*sent)
        assert bool((sent[0] == sent[0][0]).all())  # may be read during the transfer
        sent = passing.arrived()
        assert not any(each.requires_grad for each in sent)
        assert bool((sent[0] == sent[0][0]).all())
        answers.append([each.flatten()[:3].tolist() for each in sent])
    return answers


@pytest.mark.parametrize("num_workers", WORKERS)
def test_every_tensor_goes_around_the_ring_once_and_returns(num_workers: int) -> None:
    for rank, answers in enumerate(run_workers(pass_many, num_workers)):
        for step, answer in enumerate(answers, 1):
            origin = (rank - step) % num_workers
            assert answer == [[origin] * 3, [origin, origin, 2**62], [origin > 0], [origin] * 3]


def test_without_a_group_the_ring_equals_the_loss_itself() -> None:
    (query, key, temperature, negatives), ids, negative_id = make_inputs(0, {"num_ids": 7})
    shared: Case = {"temperature": temperature, "negatives": negatives, "negative_id": negative_id}
    ours = [
        ring_info_nce(query, key, ids, ids, **shared),
        ring_nt_xent(query, key, ids, temperature=0.1),
        ring_clip(query, key, ids, ids, temperature=temperature),
    ]
    expected = [
        info_nce(query, key, sample_id=ids, **shared),
        nt_xent(query, key, sample_id=ids, temperature=0.1),
        clip(query, key, query_id=ids, key_id=ids, temperature=temperature),
    ]
    assert_close(ours, expected, 1e-12)
    assert RingTransfer(query).arrived()[0].data_ptr() == query.data_ptr()


def refusals(rank: int, num_workers: int) -> list[str]:
    (query, key, _, negatives), ids, negative_id = make_inputs(rank, {})
    calls: list[tuple[Any, tuple[Tensor, ...], Case]] = [
        (ring_nt_xent, (query, key[:3], ids), {}),
        (ring_nt_xent, (query, key, ids[:3]), {}),
        (ring_nt_xent, (query, key, ids), {"temperature": 0.0}),
        (ring_info_nce, (query, key[:3], ids, ids), {}),
        (ring_info_nce, (query, key, ids[:3], ids), {}),
        (ring_info_nce, (query, key, ids, ids), {"temperature": -1.0}),
        (ring_info_nce, (query, key, ids, ids), {"negative_id": negative_id}),
        (ring_info_nce, (query, key, ids, ids), {"negatives": negatives}),
        (ring_info_nce, (query, key, ids, ids), {"negatives": negatives, "negative_id": negative_id[:3]}),
        (ring_info_nce, (query, key, ids, ids), {"negatives": negatives[:, :2], "negative_id": negative_id}),
        (ring_clip, (query, key[:3], ids, ids), {}),
        (ring_clip, (query, key, ids, ids[:3]), {}),
        (ring_clip, (query, key, ids, ids), {"temperature": 0.0}),
        (ring_clip, (query, key, ids, ids), {"weight": torch.ones(3)}),
        (partial(ring_siglip, bias=BIAS), (query, key[:3], ids, ids), {}),
        (partial(ring_siglip, bias=BIAS), (query, key, ids, ids[:3]), {}),
        (partial(ring_siglip, bias=torch.ones(2)), (query, key, ids, ids), {}),
        (partial(ring_siglip, bias=BIAS), (query, key, ids, ids), {"weight": torch.ones(3)}),
    ]
    texts = []
    for loss, rows, changes in calls:
        with pytest.raises(ConfigError) as caught:
            loss(*rows, **{"temperature": 0.1, **changes})
        texts.append(str(caught.value))
    return texts


def test_invalid_input_is_refused_before_any_message() -> None:
    expected = [
        "the two views must be",
        "sample_id does not match its rows",
        "the temperature must be above 0",
        "query and key must be",
        "query_id does not match its rows",
        "the temperature must be above 0",
        "negative_id requires negatives",
        "negative_id is None",
        "negative_id does not match its rows",
        "the negatives must be",
        "query and key must be",
        "key_id does not match its rows",
        "the temperature must be above 0",
        "weight does not match its rows",
        "query and key must be",
        "key_id does not match its rows",
        "the bias must be a number",
        "weight does not match its rows",
    ]
    for texts in run_workers(refusals, 2):
        for text, start in zip(texts, expected, strict=True):
            assert start in text
