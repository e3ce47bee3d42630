"""The cases of the peers' own tests of losses and queues, for raycl's functions.

Each section names the project, the file of its tests, and the commit. ``docs/objectives.md`` lists the differences.
raycl's losses take rows of unit length, so rows are normalized here where the peer's loss does it.
"""

import math
import sys
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.gradient_cache import embed_in_chunks
from raycl.losses import clip, dcl, info_nce, nnclr, nt_xent, siglip, supcon
from raycl.losses.example_ids import ExampleIds
from raycl.losses.guide import Guide
from raycl.losses.nnclr import nearest_rows
from raycl.losses.objective import Matryoshka, StoreBatch, build_objective
from raycl.negatives.queue import KeyQueue
from raycl.recipes import recipe
from tests.embeddings import make_rows, make_views
from tests.gradients import assert_close, leaves, value_and_gradients
from tests.plain_losses import are_nearer, plain_dcl, plain_info_nce, plain_nt_xent, plain_supcon
from tests.tiles import tiny_tiles_in

pytestmark = pytest.mark.usefixtures("one_thread")


def random_views(batch: int, dim: int, seed: int = 0, *, positive: bool = False) -> tuple[Tensor, Tensor]:
    """Return two views of unit rows, normal, or uniform from 0 to 1."""
    generator = torch.Generator().manual_seed(seed)
    draw = torch.rand if positive else torch.randn
    rows = draw(2, batch, dim, generator=generator)
    return F.normalize(rows[0], dim=1), F.normalize(rows[1], dim=1)


# lightly, tests/loss/test_ntx_ent_loss.py at e8d317fc (August 2026)


@pytest.mark.parametrize("batch", (1, 2, 4))
@pytest.mark.parametrize("dim", (1, 2, 16, 64))
@pytest.mark.parametrize("temperature", (0.1, 1.0, 10.0))
def test_nt_xent_is_symmetric_and_follows_the_algorithm_of_the_paper(
    batch: int, dim: int, temperature: float
) -> None:
    views = random_views(batch, dim)
    values = [nt_xent(*each, temperature=temperature).item() for each in (views, views[::-1])]
    expected = plain_nt_xent(*(each.double() for each in views), torch.tensor(temperature)).item()
    assert values == pytest.approx([expected] * 2, abs=1e-5)


@pytest.mark.parametrize("dim", (32, 1))
def test_nt_xent_is_symmetric_for_any_batch(dim: int) -> None:
    for batch in range(1, 20):
        view_a, view_b = random_views(batch, dim, batch)
        there, back = (
            nt_xent(*views, temperature=0.5).item() for views in ((view_a, view_b), (view_b, view_a))
        )
        assert there == pytest.approx(back, abs=1e-5)


@pytest.mark.parametrize("batch", (1, 2, 8, 16))
@pytest.mark.parametrize("temperature", (0.1, 1.0, 7.0))
def test_parallel_rows_have_the_loss_of_guessing(batch: int, temperature: float) -> None:
    rows = F.normalize(torch.tensor([[1.0, 2.0]]), dim=1).repeat(batch, 1)
    assert nt_xent(rows, rows, temperature=temperature).item() == pytest.approx(math.log(2 * batch - 1))


@pytest.mark.parametrize("batch", (1, 2, 8, 16))
@pytest.mark.parametrize("capacity", (1, 2, 8, 15, 16, 17))
@pytest.mark.parametrize("temperature", (0.1, 1.0, 7.0))
def test_parallel_rows_and_a_full_queue_have_the_loss_of_guessing(
    batch: int, capacity: int, temperature: float
) -> None:
    rows = F.normalize(torch.tensor([[1.0, 2.0]]), dim=1).repeat(batch, 1)
    queue = KeyQueue(capacity, 2)
    for step in range(capacity // batch + 2):
        queue.push(rows.numpy(), np.arange(batch), step)
    negatives = torch.from_numpy(queue.negatives().rows)
    value = info_nce(rows, rows, temperature=temperature, in_batch=False, negatives=negatives)
    assert value.item() == pytest.approx(math.log(capacity + 1), rel=1e-5)


def test_a_negative_temperature_is_refused_where_lightly_accepts_it() -> None:
    with pytest.raises(ConfigError, match="the temperature must be above 0, got -1"):
        nt_xent(*random_views(4, 32), temperature=-1.0)


# lightly, tests/loss/test_dcl_loss.py at e8d317fc


@pytest.mark.parametrize("batch", (2, 3))
@pytest.mark.parametrize("dim", (1, 3))
@pytest.mark.parametrize("temperature", (0.1, 0.5, 1.0))
@pytest.mark.parametrize("sigma", (None, 0.5))
def test_dcl_is_positive_and_symmetric_for_positive_rows(
    batch: int, dim: int, temperature: float, sigma: float | None
) -> None:
    views = random_views(batch, dim, positive=True)
    there, back = (dcl(*each, temperature=temperature, sigma=sigma).item() for each in (views, views[::-1]))
    assert there > 0
    assert there == pytest.approx(back, abs=1e-5)


@pytest.mark.parametrize("batch", (3, 4))
@pytest.mark.parametrize("dim", (5, 7))
@pytest.mark.parametrize("temperature", (0.1, 0.5))
def test_dcl_equals_a_loop_over_rows(batch: int, dim: int, temperature: float) -> None:
    views = random_views(batch, dim)
    expected = plain_dcl(*views, torch.tensor(temperature)).item()
    assert dcl(*views, temperature=temperature).item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("sigma", (1e-7, 0.5, 1e4))
def test_the_weights_of_dclw_are_finite_for_any_sigma(sigma: float) -> None:
    assert dcl(*random_views(3, 5, positive=True), temperature=0.1, sigma=sigma).isfinite()


def test_dcl_trains_a_layer() -> None:
    layer = nn.Linear(5, 5)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    rows = random_views(3, 5, positive=True)
    losses = []
    for _ in range(5):
        loss = dcl(*(F.normalize(layer(each), dim=1) for each in rows), temperature=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]


# lightly, tests/models/modules/test_memory_bank.py at e8d317fc


def test_a_queue_has_the_newest_batch_in_the_next_slots() -> None:
    queue, rng = KeyQueue(9, 2), np.random.default_rng(0)
    for step in range(33):
        batch = rng.standard_normal((3, 2), np.float32)
        first = 3 * step % 9
        before = queue.negatives().rows[first : first + 3].copy()
        queue.push(batch, np.arange(3), step)
        assert not np.array_equal(before, batch)
        assert np.array_equal(queue.negatives().rows[first : first + 3], batch)


def test_a_queue_keeps_the_end_of_a_batch_that_wraps_where_lightly_drops_it() -> None:
    queue = KeyQueue(5, 2)
    batches = np.random.default_rng(0).standard_normal((3, 3, 2), np.float32)
    queue.push(batches[0], np.arange(3), 0)
    assert len(queue) == 3  # lightly starts with random rows in the other slots
    assert np.array_equal(queue.negatives().rows, batches[0])
    queue.push(batches[1], np.arange(3), 1)
    # lightly writes two of the three rows, and begins at the first slot with the next batch.
    expected = np.concatenate([batches[1][2:], batches[0][1:], batches[1][:2]])
    assert np.array_equal(queue.negatives().rows, expected)
    queue.push(batches[2], np.arange(3), 2)
    assert np.array_equal(queue.negatives().rows[1:4], batches[2])


def test_a_queue_of_any_capacity_has_the_newest_rows() -> None:
    queue, rows = KeyQueue(10, 2), np.random.default_rng(0).standard_normal((99, 2), np.float32)
    for step, batch in enumerate(np.split(rows, 33)):
        queue.push(batch, np.arange(3), step)
    found = queue.negatives().rows
    assert np.array_equal(found[np.lexsort(found.T)], rows[-10:][np.lexsort(rows[-10:].T)])


def test_a_queue_of_negative_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="a queue cannot keep -1 keys"):
        KeyQueue(-1, 2)
    with pytest.raises(ConfigError, match="rows of dim -1"):
        KeyQueue(10, -1)


# lightly, tests/models/test_ModelsNNCLR.py at e8d317fc


@pytest.mark.parametrize("dim", (512, 2_048))
@pytest.mark.parametrize("capacity", (2**3, 2**8))
def test_neighbors_are_stored_rows_for_any_number_of_batches(capacity: int, dim: int) -> None:
    queue = KeyQueue(capacity, dim)
    for step in range(10):
        first, second = random_views(2, dim, step)
        stored = torch.from_numpy(queue.negatives().rows.copy())
        queue.push(second.numpy(), np.arange(2), step)
        for view in (first, second):
            neighbor = nearest_rows(view, stored)
            assert neighbor.shape == (2, dim)
            # lightly's bank has random rows at first; here the rows are their own neighbors.
            expected = stored[(view @ stored.T).argmax(1)] if step else view
            assert neighbor.equal(expected)


# solo-learn, tests/losses/test_nnclr.py at 9187ea3


def test_predictions_follow_the_neighbors_in_twenty_steps() -> None:
    generator = torch.Generator().manual_seed(0)
    neighbor, prediction = (torch.randn(32, 128, generator=generator) for _ in range(2))
    prediction.requires_grad_()
    losses = []
    for _ in range(21):
        rows = F.normalize(prediction, dim=1)
        loss = nnclr(rows, F.normalize(neighbor, dim=1), torch.empty(0, 128), temperature=0.1)
        (gradient,) = torch.autograd.grad(loss, prediction)
        prediction.data.add_(gradient, alpha=-0.5)
        losses.append(loss.item())
    assert losses[0] != 0
    assert losses[-1] < losses[0]


# open_clip, tests/test_siglip_chunked_loss.py at 89fb801 (June 2026)


def of_siglip(batch: int, **changes: Any) -> partial[Tensor]:
    """Return SigLIP with the scale and bias of the tests, and rows that require a gradient."""
    rows = leaves(*random_views(batch, 32))
    return partial(siglip, *rows, temperature=1 / 10, bias=-10.0, **changes)


def plain_chunks(query: Tensor, key: Tensor, *, has_positives: bool) -> Tensor:
    """Return the sum over all combinations, divided by the number of queries."""
    logits = 10 * query @ key.T - 10
    labels = 2 * torch.eye(len(query)) - 1 if has_positives else -torch.ones(len(query), len(key))
    return -F.logsigmoid(labels * logits).sum() / len(query)


@pytest.mark.parametrize(("batch", "size"), ((64, 64), (64, 32), (64, 8), (64, 1), (70, 8)))
def test_siglip_in_chunks_of_any_size_equals_the_whole_matrix(batch: int, size: int) -> None:
    loss = of_siglip(batch)
    expected = value_and_gradients(plain_chunks(*loss.args, has_positives=True), list(loss.args))
    with tiny_tiles_in("siglip", "softmax"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["raycl.losses.siglip"], "BLOCK_ROWS", size)
        found = value_and_gradients(loss(), list(loss.args))
    assert_close(found, expected, 1e-5)


def test_keys_of_another_worker_are_only_negatives_for_siglip() -> None:
    loss, (_, others) = of_siglip(64), random_views(64, 32, 1)
    query, key = loss.args
    both = torch.cat([key, others])
    added = loss(gathered_key=both) - loss()
    assert added.item() == pytest.approx(plain_chunks(query, others, has_positives=False).item(), rel=1e-4)


# pytorch-metric-learning, tests/losses/test_ntxent_loss.py and test_self_supervised_loss.py at 216a792 (2.9.0)

ANGLES, LABELS = (0, 10, 20, 50, 60, 80), (0, 0, 0, 1, 1, 2)


def on_circle(degrees: Sequence[float]) -> Tensor:
    angles = torch.tensor(degrees, dtype=torch.float64).deg2rad()
    return torch.stack([angles.cos(), angles.sin()], 1)


def test_pairs_of_a_class_equal_the_ntxent_of_labels() -> None:
    """Each pair of a class is a query and its key; only rows of other classes are negatives."""
    rows, label = on_circle(ANGLES), torch.tensor(LABELS)
    same = (label[:, None] == label) & ~torch.eye(6, dtype=torch.bool)
    anchor, positive = same.nonzero().unbind(1)
    assert len(anchor) == 8
    logits = rows @ rows.T / 0.1
    losses = [
        torch.cat([logits[a, p, None], logits[a][label != label[a]]]).logsumexp(0) - logits[a, p]
        for a, p in zip(anchor, positive, strict=True)
    ]
    value = info_nce(
        rows[anchor],
        rows[positive],
        temperature=0.1,
        in_batch=False,
        sample_id=label[anchor],
        negatives=rows,
        negative_id=label,
    )
    assert value.item() == pytest.approx(torch.stack(losses).mean().item(), rel=1e-9)


def test_supcon_equals_the_loop_over_anchors_and_positives() -> None:
    """The angles of the test in classes of an even size, since a sample of raycl has two views."""
    rows, label = on_circle(ANGLES), torch.tensor((0, 0, 1))
    view_a, view_b = rows[::2], rows[1::2]
    expected = plain_supcon(
        torch.cat([view_a, view_b]), label.repeat(2), torch.tensor(0.1, dtype=torch.float64)
    ).item()
    assert supcon(view_a, view_b, label, temperature=0.1).item() == pytest.approx(expected, rel=1e-9)


def test_a_batch_of_one_class_has_a_loss_where_pytorch_metric_learning_returns_zero() -> None:
    rows = on_circle((0, 10, 20))
    same = torch.zeros(3, dtype=torch.int64)
    expected = plain_supcon(rows.repeat(2, 1), same.repeat(2), torch.tensor(0.1, dtype=torch.float64)).item()
    assert supcon(rows, rows, same, temperature=0.1).item() == pytest.approx(expected, rel=1e-9)
    assert expected > 1


def test_pairs_without_negatives_have_no_loss() -> None:
    row = on_circle((0,)).requires_grad_()
    loss = info_nce(row, row, temperature=0.1)
    loss.backward()
    assert loss.item() == 0
    assert not row.grad.any()  # pyright: ignore[reportOptionalMemberAccess]


def test_distinct_labels_turn_supcon_into_nt_xent() -> None:
    views, label = random_views(100, 256), torch.arange(100)
    found = supcon(*views, label, temperature=0.1).item()
    assert found == pytest.approx(nt_xent(*views, temperature=0.1).item(), rel=1e-6)


def test_a_one_sided_comparison_of_views_is_info_nce() -> None:
    query, key = random_views(100, 256)
    logits = query.double() @ key.double().T / 0.1
    expected = F.cross_entropy(logits, torch.arange(100)).item()
    assert info_nce(query, key, temperature=0.1).item() == pytest.approx(expected, rel=1e-6)


def test_a_memory_of_the_batch_equals_the_batch() -> None:
    """tests/losses/test_cross_batch_memory.py: a memory as large as the batch changes nothing."""
    query, key = leaves(*random_views(32, 128))
    ids = torch.arange(32)
    alone = info_nce(
        query, key, temperature=0.1, in_batch=False, sample_id=ids, negatives=key, negative_id=ids
    )
    expected = value_and_gradients(info_nce(query, key, temperature=0.1), [query, key])
    assert_close(value_and_gradients(alone, [query, key]), expected, 1e-5)


# sentence-transformers, tests/sentence_transformer/losses/test_cmnrl.py, test_gradcache.py, test_cached_mnsrl.py at
# cad21198 (August 2026)

TRIPLETS = (
    ("aaa", "bbb", "ccc", "ddd", "eee"),
    ("aas", "bbs", "ccs", "dds", "ees"),
    ("xxx", "yyy", "zzz", "kkk", "fff"),
)
OTHER_TRIPLETS = (("adsa", "czx", "dsada"), ("b", "fas", "xcz"), ("c", "yyy", "asdas"))


class Letters(nn.Module):
    """A network of letter counts."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(26, 16), nn.Tanh(), nn.Linear(16, 8)).double()

    def forward(self, counts: Tensor) -> Tensor:
        return F.normalize(self.layers(counts), dim=1)


def count_letters(texts: Sequence[str]) -> Tensor:
    counts = [[text.count(letter) for letter in "abcdefghijklmnopqrstuvwxyz"] for text in texts]
    return torch.tensor(counts, dtype=torch.float64)


@pytest.fixture
def letters() -> Letters:
    torch.manual_seed(42)
    return Letters()


def ranking(network: nn.Module, columns: Sequence[Sequence[str]], chunk_size: int | None = None) -> Tensor:
    """Return InfoNCE of anchors, positives and negatives at a scale of 20, in chunks if a size is given."""
    embed = network if chunk_size is None else partial(embed_in_chunks, network, chunk_size=chunk_size)
    anchors, positives, *negatives = (embed(count_letters(column)) for column in columns)
    return info_nce(anchors, positives, temperature=1 / 20, negatives=negatives[0] if negatives else None)


def gradients_of(loss: Tensor, network: nn.Module) -> list[Tensor]:
    network.zero_grad()
    loss.backward()
    return [loss.detach(), *(each.grad.clone() for each in network.parameters() if each.grad is not None)]


@pytest.mark.parametrize("scale", (1.0, 1_000.0, 1 / 2, 1 / 4))
@pytest.mark.parametrize("chunk_size", (2, 3, 50))
def test_triplets_in_chunks_have_the_scaled_loss_and_gradient_of_the_whole_batch(
    letters: Letters, chunk_size: int, scale: float
) -> None:
    whole = gradients_of(ranking(letters, TRIPLETS), letters)
    chunked = gradients_of(scale * ranking(letters, TRIPLETS, chunk_size), letters)
    assert len(whole) == 5
    assert_close(chunked, [scale * each for each in whole], 1e-9)
    assert chunked[0].item() != pytest.approx(scale * ranking(letters, OTHER_TRIPLETS).item(), rel=1e-5)


def test_triplets_equal_a_softmax_over_all_positives_and_negatives(letters: Letters) -> None:
    anchors, *others = (letters(count_letters(column)) for column in TRIPLETS)
    logits = 20 * anchors @ torch.cat(others).T
    expected = F.cross_entropy(logits, torch.arange(5)).item()
    assert ranking(letters, TRIPLETS).item() == pytest.approx(expected, rel=1e-9)


def test_two_forward_passes_may_precede_one_backward_pass(letters: Letters) -> None:
    first, second = ([column[part] for column in TRIPLETS] for part in (slice(0, 4), slice(1, 5)))
    together = gradients_of(ranking(letters, first, 2) + ranking(letters, second, 2), letters)
    each = [gradients_of(ranking(letters, columns, 2), letters) for columns in (first, second)]
    assert_close(together, [a + b for a, b in zip(*each, strict=True)], 1e-9)


def test_the_loss_in_chunks_is_the_same_without_gradients(letters: Letters) -> None:
    with torch.no_grad():
        assert ranking(letters, TRIPLETS, 2).item() == pytest.approx(ranking(letters, TRIPLETS).item())


def test_both_directions_in_chunks_equal_the_whole_batch(letters: Letters) -> None:
    rows = [count_letters(column) for column in TRIPLETS[:2]]
    chunked = (embed_in_chunks(letters, each, chunk_size=2) for each in rows)
    found = gradients_of(clip(*chunked, temperature=1 / 20), letters)
    logits = 20 * letters(rows[0]) @ letters(rows[1]).T
    own = torch.arange(5)
    expected = (F.cross_entropy(logits, own) + F.cross_entropy(logits.T, own)) / 2
    assert_close(found, gradients_of(expected, letters), 1e-9)


@pytest.mark.parametrize("loss", (info_nce, clip))
def test_a_batch_gathered_twice_equals_the_doubled_batch_on_the_second_worker(loss: Any) -> None:
    """The second worker's offset is its first gathered row; in the peer, a wrong one masks the positives."""
    query, key = (each[:4] for each in random_views(4, 16))
    doubled = query.repeat(2, 1), key.repeat(2, 1)
    gathered = {"gathered_key": doubled[1]} | ({"gathered_query": doubled[0]} if loss is clip else {})
    value = loss(query, key, temperature=1 / 20, offset=4, **gathered)
    assert value.isfinite()
    assert value.item() == pytest.approx(loss(*doubled, temperature=1 / 20).item(), rel=1e-5)


def test_the_positive_of_the_second_worker_is_a_candidate_at_a_low_temperature() -> None:
    """tests/sentence_transformer/losses/test_gist_embed.py, without a guide: rows of another worker come first."""
    query, key = random_views(3, 16, 7)
    gathered = torch.cat([random_views(3, 16, 1234)[0], key])
    expected = plain_info_nce(query.double(), gathered.double(), torch.tensor(0.01), offset=3).item()
    found = info_nce(query, key, temperature=0.01, gathered_key=gathered, offset=3).item()
    assert found == pytest.approx(expected, rel=1e-5)


# sentence-transformers, tests/sentence_transformer/losses/test_gist_embed.py and test_cached_gist_embed.py at cad21198


def gist_of(*columns: Tensor, temperature: float = 0.01, **settings: Any) -> Tensor:
    """Return the loss of the peer on embeddings of the model, and then of the guide."""
    peer = pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    loss = peer.GISTEmbedLoss.__new__(peer.GISTEmbedLoss)
    nn.Module.__init__(loss)
    defaults = {
        "margin_strategy": "absolute",
        "margin": 0.0,
        "contrast_anchors": True,
        "contrast_positives": True,
    }
    fixed = {"gather_across_devices": False, "must_retokenize": False, "temperature": temperature}
    for name, value in {**defaults, **fixed, **settings}.items():
        setattr(loss, name, value)
    loss.similarity_fct, loss.cross_entropy_loss = nn.CosineSimilarity(dim=-1), nn.CrossEntropyLoss()
    half = len(columns) // 2
    loss.model = lambda features: {"sentence_embedding": columns[:half][features["column"]]}
    loss.guide = lambda features: {"sentence_embedding": columns[half:][features["column"]]}
    return loss([{"column": column} for column in range(half)], None)


@pytest.mark.parametrize("margin", (0.0, 0.1))
def test_the_guide_keeps_the_positive_of_the_second_worker(margin: float) -> None:
    query, key = random_views(3, 16, 7)
    gathered = torch.cat([random_views(3, 16, 1234)[0], key])
    other = random_views(3, 16, 1234)[0]
    guide = Guide.of(torch.cat([other, query]), gathered, margin=margin)
    found = info_nce(query, key, temperature=0.01, gathered_key=gathered, offset=3, guide=guide)
    nearer = are_nearer(query, key, gathered, margin=margin)
    doubles = query.double(), gathered.double()
    expected = plain_info_nce(*doubles, torch.tensor(0.01), offset=3, nearer=nearer).item()
    assert found.item() == pytest.approx(expected, rel=1e-5)


def test_a_relative_margin_masks_a_negative_nearer_than_a_distant_positive() -> None:
    query = torch.tensor([[1.0, 0.0, 0.0], [-0.49, 0.0, math.sqrt(1 - 0.49**2)]])
    key = torch.stack([torch.tensor([-0.5, math.sqrt(1 - 0.5**2), 0.0]), query[1]])  # of cosines -0.5 and 1
    guide = Guide.of(query, key, margin=0.05, relative=True)
    first = info_nce(query[:1], key[:1], temperature=0.01, gathered_key=key, guide=guide)
    assert first.item() == 0  # the only negative is masked
    assert info_nce(query[:1], key[:1], temperature=0.01, gathered_key=key).item() > 0.5


@pytest.mark.parametrize("strategy", ("absolute", "relative"))
@pytest.mark.parametrize("margin", (0.0, 0.1, 0.4))
def test_a_guided_loss_of_pairs_and_negatives_equals_gist_without_its_further_candidates(
    margin: float, strategy: str
) -> None:
    model, guide = (
        (*make_views(40, 16, noise=0.8, seed=seed), make_rows(40, 16, seed=seed)) for seed in (1, 2)
    )
    settings: dict[str, Any] = {"margin": margin, "margin_strategy": strategy, "temperature": 0.1}
    expected = gist_of(*model, *guide, **settings, contrast_anchors=False, contrast_positives=False)
    rows = Guide.of(*guide, margin=margin, relative=strategy == "relative")
    found = info_nce(*model[:2], temperature=0.1, negatives=model[2], guide=rows)
    assert found.item() == pytest.approx(expected.item(), rel=1e-5)
    # By default the peer adds queries as negatives of queries, and positives as negatives of positives.
    assert gist_of(*model, *guide, **settings).item() > found.item() + 0.01


# sentence-transformers, tests/sentence_transformer/losses/test_matryoshka.py and test_cmnrl.py at cad21198


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dims": []}, "matryoshka_dims must be different lengths, got []"),
        ({"dims": [512, 0, 256]}, "matryoshka_dims"),
        ({"dims": [512, -100, 256]}, "matryoshka_dims"),
        ({"dims": [512, 256, 128], "weights": [1.0, 0.5]}, "2 numbers for 3 matryoshka_dims"),
        ({"dims": [512, 1024, 2048, 256]}, "matryoshka_dims has 2048, and the embedding has 1024 numbers"),
    ],
)
def test_prefixes_that_do_not_fit_are_refused(settings: dict[str, Any], message: str) -> None:
    changes = {f"stages.0.matryoshka_{name}": value for name, value in settings.items()}
    with pytest.raises(ConfigError) as caught:
        override(recipe("two_tower"), {"projection_head.dim": 1024, **changes})
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "settings",
    [
        {"dims": [1024, 768, 512, 256, 128]},
        {"dims": [1024, 768, 512, 256], "weights": [1.0, 0.8, 0.6, 0.4]},
        {"dims": [256, 768, 512, 1024], "weights": [0.6, 1.0, 0.8, 0.4]},
        {"dims": [512, 256, 128]},  # without the whole embedding, where the peer warns
    ],
)
def test_prefixes_that_fit_are_kept_in_their_order(settings: dict[str, Any]) -> None:
    changes = {f"stages.0.matryoshka_{name}": value for name, value in settings.items()}
    stage = override(recipe("two_tower"), {"projection_head.dim": 1024, **changes}).stages[0]
    assert stage.matryoshka_dims == tuple(settings["dims"])
    assert stage.matryoshka_weights == (tuple(settings["weights"]) if "weights" in settings else None)


@pytest.mark.parametrize("chunk_size", (2, 3))
def test_prefixes_of_embeddings_in_chunks_equal_the_sum_over_prefixes(
    letters: Letters, chunk_size: int
) -> None:
    rows, dims, ids = [count_letters(column) for column in TRIPLETS[:2]], (8, 4, 2), torch.arange(5)
    objective = Matryoshka(
        objective=build_objective("info_nce", hinge_weight=0.0, temperature=1 / 20, pairs=True),
        dims=dims,
        weights=(1.0, 1.0, 1.0),
    )
    query, key = (embed_in_chunks(letters, each, chunk_size=chunk_size) for each in rows)
    found = gradients_of(objective(query, key, StoreBatch(), ExampleIds(query=ids, key=ids)), letters)
    expected = torch.zeros((), dtype=torch.float64)
    for dim in dims:
        anchors, positives = (F.normalize(letters(each)[:, :dim], dim=1) for each in rows)
        expected = expected + F.cross_entropy(20 * anchors @ positives.T, ids)
    assert_close(found, gradients_of(expected, letters), 1e-9)
