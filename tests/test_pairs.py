"""Texts and pairs from rows to the loss: drawn views, shared ids, and masked false negatives."""

import math
from collections import Counter
from dataclasses import dataclass, field
from itertools import combinations, groupby
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from raycl.config import RunConfig
from raycl.data.in_memory import Batch, InMemoryDataset, texts_of, tokens_of
from raycl.errors import ConfigError
from raycl.loss_specs import MIN_TEMPERATURE
from raycl.losses.clip import Clip
from raycl.losses.example_ids import ExampleIds, IdExchange, merge_ids
from raycl.losses.hinge import Hinge
from raycl.losses.info_nce import InfoNce
from raycl.losses.objective import Objective, StoreBatch
from raycl.models.build import build_towers
from raycl.models.towers import LearnedTemperature, Tower, TwoTowers
from raycl.training.evaluators import RetrievalEvaluator
from raycl.training.step import train_step
from raycl.training.stores import build_store
from raycl.training.train_state import TrainState
from raycl.training.transforms import PairTransform, Transform, build_transform, count_documents
from raycl.training.views import ViewMaker, stacked
from tests.pairs import BAG, TRANSFORMER, clicks, noise_images, rows_of, small_config, vocabulary
from tests.texts import invented_texts

CPU = torch.device("cpu")
TEXTS = invented_texts(60, seed=3)


def drawing_of(config: RunConfig) -> Transform:
    return build_transform(config, vocabulary().tokenizer)


def towers_of(config: RunConfig) -> Any:
    return build_towers(config, vocabulary())


def whole(rows: InMemoryDataset, *, epoch: int = 0) -> Batch:
    return rows.take(np.arange(len(rows)), epoch=epoch)


# Rows that share an id


def assigned(names: ExampleIds) -> ExampleIds:
    return IdExchange(CPU).start(names)()


def connected(names: list[list[int]], *, shared: bool = False) -> list[int]:
    """Return the smallest id in each row's connected component, by a plain loop over pairs of rows.

    Ids of different columns are compared only if they are shared; otherwise the first column counts.
    """
    groups = [{row} for row in range(len(names))]
    for one, other in combinations(range(len(names)), 2):
        columns = zip(names[one], names[other], strict=True)
        if set(names[one]) & set(names[other]) if shared else any(a == b for a, b in columns):
            joined = groups[one] | groups[other]
            for row in joined:
                groups[row] = joined
    return [min(min(names[member] if shared else names[member][:1]) for member in group) for group in groups]


@given(st.data(), st.integers(0, 14), st.integers(1, 3), st.booleans())
def test_rows_connected_by_ids_share_the_smallest_id(
    data: st.DataObject, num_rows: int, num_names: int, shared: bool
) -> None:
    row = st.lists(st.integers(-8, 8), min_size=num_names, max_size=num_names)
    names = data.draw(st.lists(row, min_size=num_rows, max_size=num_rows))
    came = merge_ids(np.asarray(names, np.int64).reshape(-1, num_names), shared_id_space=shared)
    assert came.tolist() == connected(names, shared=shared)


def test_a_long_chain_of_shared_ids_is_one_component() -> None:
    # Each row shares one id with the row before: by text, by id, by text, ...
    chain = torch.arange(1, 500)
    names = torch.stack([chain // 2, (chain + 1) // 2 + 1_000], dim=1)
    shuffled = names[torch.randperm(len(names), generator=torch.Generator().manual_seed(0))]
    assert np.unique(merge_ids(shuffled.numpy())).tolist() == [0]


@given(st.data())
def test_explicit_negatives_count_as_keys_and_queries_do_not(data: st.DataObject) -> None:
    name = st.lists(st.integers(0, 8), min_size=2, max_size=2)
    query, key = (data.draw(st.lists(name, min_size=4, max_size=4)) for _ in range(2))
    negative = data.draw(st.lists(name, max_size=5))
    rows = [torch.tensor(each, dtype=torch.int64).reshape(-1, 2) for each in (query, key, negative)]
    ids = assigned(ExampleIds(query=rows[0], key=rows[1], negative=rows[2]))
    assert ids.negative is not None
    assert ids.query.tolist() == connected(query)
    assert [*ids.key.tolist(), *ids.negative.tolist()] == connected([*key, *negative])


# Drawn views


def lists_of_texts(num_rows: int, num_texts: int) -> list[list[str]]:
    return [TEXTS[row : row + num_texts] for row in range(num_rows)]


def numbers_shown(config: RunConfig, rows: InMemoryDataset, *, epoch: int, view: int) -> list[int]:
    """Return which text of its list each row shows."""
    batch = whole(rows, epoch=epoch)
    texts, tokens = texts_of(batch, "text"), drawing_of(config).view(batch, view).on(CPU)
    shown = []
    for row, each in enumerate(tokens):
        members = [texts.picked(np.full(len(texts), number)) for number in range(texts.counts[row])]
        same = [each.equal(padded_to(member.padded()[row], len(each))) for member in members]
        assert same.count(True) == 1
        shown.append(same.index(True))
    return shown


def padded_to(row: np.ndarray, length: int) -> Tensor:
    return F.pad(torch.from_numpy(row), (0, length))[:length]


@pytest.mark.parametrize("num_texts", [2, 3, 5])
def test_two_views_show_two_different_texts_of_a_sample_equally_often(num_texts: int) -> None:
    config = small_config("simcse")
    rows = rows_of(config, {"text": lists_of_texts(40, num_texts)})
    pairs: Counter[tuple[int, int]] = Counter()
    for epoch in range(12):
        shown = [numbers_shown(config, rows, epoch=epoch, view=view) for view in (0, 1)]
        pairs.update(zip(*shown, strict=True))
    assert all(first != second for first, second in pairs)
    # 480 draws with equal probability: all counts are within four standard deviations.
    expected = 480 / (num_texts * (num_texts - 1))
    assert len(pairs) == num_texts * (num_texts - 1)
    assert all(abs(count - expected) < 4 * expected**0.5 for count in pairs.values())


@pytest.mark.parametrize("augmentation", [{}, {"text_augment.deletion": 0.3, "text_augment.repetition": 0.3}])
def test_a_view_depends_only_on_seed_epoch_and_sample(augmentation: dict[str, float]) -> None:
    config = small_config("simcse", augmentation)
    rows, drawing = rows_of(config, {"text": lists_of_texts(20, 4)}), drawing_of(config)
    order = np.random.default_rng(0).permutation(20)
    for view in (0, 1):
        tokens = drawing.view(whole(rows, epoch=3), view).on(CPU)
        again = drawing.view(rows.take(order, epoch=3), view).on(CPU)
        assert all(a.equal(b) for a, b in zip(tokens[torch.from_numpy(order)], again, strict=True))
        alone = drawing.view(rows.take(order[:1], epoch=3), view).on(CPU)[0]
        assert alone.equal(tokens[order[0]][: len(alone)])
        other_epoch = drawing.view(whole(rows, epoch=4), view).on(CPU)
        seeded = drawing_of(small_config("simcse", {**augmentation, "seed": 1}))
        for other in (other_epoch, seeded.view(whole(rows, epoch=3), view).on(CPU)):
            assert not torch.equal(*(F.pad(each, (0, 20 - each.shape[1])) for each in (tokens, other)))


def test_rows_with_one_text_and_with_several_share_a_batch() -> None:
    config = small_config("simcse")
    rows = rows_of(config, {"text": [TEXTS[0], TEXTS[1:3], [TEXTS[3]], TEXTS[4:9]]})
    drawing, batch = drawing_of(config), whole(rows)
    first, second = (drawing.view(batch, view).on(CPU) for view in (0, 1))
    pairs = [[padded_to(each.numpy(), 10) for each in pair] for pair in zip(first, second, strict=True)]
    assert [a.equal(b) for a, b in pairs] == [True, False, True, False]
    assert drawing.plain(batch).on(CPU).equal(drawing.plain_key(batch).on(CPU))
    expected = vocabulary().tokenizer.encode([TEXTS[0], TEXTS[1], TEXTS[3], TEXTS[4]], 10)
    for row, tokens in zip(drawing.plain(batch).on(CPU), expected, strict=True):
        assert row.equal(padded_to(tokens.astype(np.int64), len(row)))
    assert drawing.ids_and_negatives(batch)[1] is None


def embedded(config: RunConfig, rows: InMemoryDataset, *, training: bool) -> tuple[Tensor, Tensor]:
    learner = TrainState.build(config, towers_of(config), num_samples=None)
    learner.tower.train(training)
    torch.manual_seed(0)
    views = next(ViewMaker.of(config, drawing_of(config), CPU).views(iter([whole(rows)])))
    found = learner.embed(views, step=0)
    assert found.key is not None
    return found.query.detach(), found.key.detach()


def test_the_views_of_simcse_differ_only_by_dropout() -> None:
    config = small_config("simcse", {"encoder.kwargs": TRANSFORMER | {"dropout": 0.1}})
    rows = rows_of(config, {"text": TEXTS[:20]})
    drawing = drawing_of(config)
    assert drawing.view(whole(rows), 0).on(CPU).equal(drawing.view(whole(rows), 1).on(CPU))
    query, key = embedded(config, rows, training=False)
    assert torch.allclose(query, key, atol=1e-6)
    query, key = embedded(config, rows, training=True)
    assert bool(((query - key).abs().amax(1) > 1e-3).all())
    without = small_config("simcse")
    assert torch.allclose(*embedded(without, rows, training=True), atol=1e-6)


def test_the_views_of_esimcse_repeat_tokens() -> None:
    config = small_config("esimcse", {"text.max_length": 60})
    texts = [text for text in TEXTS if len(text) < 60]
    rows = rows_of(config, {"text": texts})
    views = [drawing_of(config).view(whole(rows), view).on(CPU).tolist() for view in (0, 1)]
    repeated = []
    for row, tokens in enumerate(map(np.ndarray.tolist, vocabulary().tokenizer.encode(texts, 60))):
        for shown in ([token for token in view[row] if token] for view in views):
            repeated.append(len(shown) - len(tokens))
            assert repeated[-1] <= max(2, 0.32 * len(tokens))
            # Tokens keep their order and appear at most twice, so the runs of equal tokens match the text.
            assert [token for token, _ in groupby(shown)] == [token for token, _ in groupby(tokens)]
    assert min(repeated) == 0
    assert max(repeated) > 2
    assert views[0] != views[1]


def test_texts_are_identified_by_the_shown_text_and_for_slots_by_sample() -> None:
    config = small_config("simcse")
    # Rows 0 and 1 share a text, row 2 shows the first text of row 0 in another case, row 3 is unrelated.
    texts = [TEXTS[:2], [TEXTS[2], TEXTS[1]], TEXTS[0].upper(), TEXTS[3:5], TEXTS[5]]
    rows = rows_of(config, {"text": texts})
    drawing = drawing_of(config)
    known, _ = drawing.ids_and_negatives(whole(rows))
    assert known.negative is None
    shown = [drawing.shown(whole(rows), number).text_id.tolist() for number in (0, 1)]
    assert known.query.T.tolist() == shown
    assert known.key.T.tolist() == shown[::-1]  # a store identifies a key by its shown text
    ids = assigned(known)
    # Texts with equal tokens are equal: an encoder cannot distinguish them.
    assert ids.query.equal(ids.key)
    first, second, third, alone, last = ids.query.tolist()
    assert first == second == third
    assert len({first, alone, last}) == 3
    stored = torch.tensor([shown[0][0], shown[1][0], 5])
    assert ids.of(stored).tolist() == [first, first, 5]
    slots = small_config("simcse", {"key": "memory_bank", "negatives.store": "memory_bank"})
    assert drawing_of(slots).ids_and_negatives(whole(rows))[0].query[:, 0].tolist() == [0, 1, 2, 3, 4]


# Pairs


def test_queries_are_view_0_and_documents_are_view_1_unchanged() -> None:
    config = small_config()
    values = clicks(6, num_negatives=[2, 0, 3])
    drawing, batch = drawing_of(config), whole(rows_of(config, values))
    for tokens, role, length in (
        (drawing.view(batch, 0).on(CPU), "query", 10),
        (drawing.plain(batch).on(CPU), "query", 10),
        (drawing.view(batch, 1).on(CPU), "document", 14),
        (drawing.plain_key(batch).on(CPU), "document", 14),
        (drawing.ids_and_negatives(batch)[1], "negatives", 14),
    ):
        texts = values[role] if role != "negatives" else [text for row in values[role] for text in row]
        expected = vocabulary().tokenizer.encode(texts, length)
        assert tokens is not None
        assert len(tokens) == len(expected)
        for row, its_tokens in zip(tokens, expected, strict=True):
            assert row.equal(padded_to(its_tokens.astype(np.int64), len(row)))


def test_a_batch_without_explicit_negatives_has_none() -> None:
    config = small_config()
    values = clicks(6, num_negatives=[0, 0, 0, 2])
    drawing, rows = drawing_of(config), rows_of(config, values)
    known, tokens = drawing.ids_and_negatives(rows.take(np.array([0, 1, 2])))
    assert tokens is None
    assert known.negative is not None
    assert known.negative.shape == (0, 2)
    without = {role: values[role] for role in ("query", "document")}
    batch = whole(rows_of(config, without))
    known, tokens = drawing.ids_and_negatives(batch)
    assert tokens is known.negative is None


def test_unused_explicit_negatives_are_omitted() -> None:
    config = small_config(settings={"negatives.explicit": False})
    values = clicks(6, num_negatives=[2])
    batch = whole(rows_of(config, values))
    known, tokens = drawing_of(config).ids_and_negatives(batch)
    all_known, _ = drawing_of(small_config()).ids_and_negatives(batch)
    assert tokens is known.negative is None
    assert known.query.equal(all_known.query)
    assert known.key.equal(all_known.key)


def test_a_pair_draws_some_of_its_explicit_negatives_in_each_epoch() -> None:
    config = small_config(settings={"negatives.explicit": 2, "seed": 3})
    values = clicks(40, num_negatives=[6, 0, 2, 1])
    values["negative_ids"] = [
        [f"{row}-{place}" for place in range(len(each))] for row, each in enumerate(values["negatives"])
    ]
    rows, drawing = rows_of(config, values), drawing_of(config)
    all_known, shown = drawing_of(small_config()).ids_and_negatives(whole(rows))
    everything = all_known.negative
    assert everything is not None
    assert shown is not None
    place_of = {number: place for place, number in enumerate(everything[:, 1].tolist())}
    counts = np.array([len(each) for each in values["negatives"]])
    owner = np.repeat(np.arange(40), counts)
    seen: list[set[int]] = [set() for _ in range(40)]
    for epoch in range(30):
        order = np.random.default_rng(epoch).permutation(40)
        batch = rows.take(order, epoch=epoch)
        known, tokens = drawing.ids_and_negatives(batch)
        ids = known.negative
        assert ids is not None
        assert tokens is not None
        places = [place_of[number] for number in ids[:, 1].tolist()]
        # Texts and ids are those of the same negatives, of each row in the order of the batch.
        assert ids.equal(everything[places])
        assert all(
            row[:14].equal(padded_to(shown[place][shown[place] != 0].numpy(), len(row)))
            for row, place in zip(tokens, places, strict=True)
        )
        assert owner[places].tolist() == np.repeat(order, np.minimum(counts, 2)[order]).tolist()
        for place in places:
            seen[owner[place]].add(place)
        # A row draws the same, whatever its batch.
        alone = drawing.ids_and_negatives(rows.take(order[:7], epoch=epoch))[0].negative
        assert alone is not None
        assert alone.equal(ids[: len(alone)])
    assert [len(each) for each in seen] == counts.tolist()


def names_of(*roles: str) -> ExampleIds:
    values = clicks(30, num_negatives=[2, 0, 3])
    config = small_config()
    batch = whole(rows_of(config, {role: values[role] for role in ("query", "document", *roles)}))
    return drawing_of(config).ids_and_negatives(batch)[0]


def test_pairs_are_identified_by_texts_and_by_ids_if_present() -> None:
    values = clicks(30, num_negatives=[2, 0, 3])
    negatives = [text for row in values["negatives"] for text in row]
    negative_ids = [int(each) for row in values["negative_ids"] for each in row]
    by_text = names_of("negatives")
    assert by_text.negative is not None
    assert (by_text.query.shape, by_text.key.shape) == ((30, 1), (30, 1))
    assert by_text.negative.shape == (len(negatives), 1)
    assert_same_equalities(by_text.query[:, 0], values["query"])
    documents = torch.cat([by_text.key, by_text.negative])[:, 0]
    assert_same_equalities(documents, [*values["document"], *negatives])

    named = names_of("negatives", "query_id", "document_id", "negative_ids")
    assert named.negative is not None
    assert named.query[:, 0].equal(by_text.query[:, 0])
    assert_same_equalities(named.query[:, 1], values["query_id"])
    names = torch.cat([named.key, named.negative])
    assert names[:, 0].equal(documents)
    assert_same_equalities(names[:, 1], [*map(int, values["document_id"]), *negative_ids])


def test_negatives_without_ids_are_identified_by_text_although_documents_have_ids() -> None:
    known, by_text = names_of("negatives", "document_id"), names_of("negatives")
    assert known.negative is not None
    assert by_text.negative is not None
    assert known.query.shape[1] == 1
    assert known.negative.equal(by_text.negative.expand(-1, 2))
    ids = assigned(known)
    assert ids.negative is not None
    same_text = known.negative[:, :1] == known.key[:, 0]
    assert bool(same_text.any())
    assert bool((ids.negative[:, None] == ids.key)[same_text].all())


def assert_same_equalities(ids: Tensor, things: list[Any]) -> None:
    """Assert that two rows have equal ids exactly if they are the same thing."""
    numbers = [things.index(each) for each in things]
    assert torch.equal(ids[:, None] == ids, torch.tensor(numbers)[:, None] == torch.tensor(numbers))


# Queries, documents and negatives of one letter are the same thing once ids are compared.
QUERIES = [("boats", 1), ("sea", 2), ("boats", 3), ("wind", 4), ("rain", 5), ("the sea", 2), ("sun", 6)]
DOCUMENTS = [("a", 10), ("b", 11), ("c", 12), ("a", 13), ("b in other words", 11), ("d", 14), ("e", 15)]
NEGATIVES = [[("c", 16), ("z", 17)], [], [], [("b in yet other words", 11)], [], [("y", 10)], [("w", 18)]]
THINGS_BY_NAME = ["QSQWRSU", "abcabde", "czbaw"]  # "y" shares the id of "a"
THINGS_BY_TEXT = ["QSQWRTU", "abcaBde", "czxyw"]


def planted(*, with_ids: bool) -> ExampleIds:
    values: dict[str, list[Any]] = {
        "query": [text for text, _ in QUERIES],
        "document": [text for text, _ in DOCUMENTS],
        "negatives": [[text for text, _ in row] for row in NEGATIVES],
    }
    if with_ids:
        values |= {
            "query_id": [name for _, name in QUERIES],
            "document_id": [name for _, name in DOCUMENTS],
            "negative_ids": [[name for _, name in row] for row in NEGATIVES],
        }
    config = small_config()
    return drawing_of(config).ids_and_negatives(whole(rows_of(config, values)))[0]


@pytest.mark.parametrize(
    "contrast",
    [
        Clip(temperature=0.5),
        InfoNce(temperature=0.5, in_batch=True, pairs=True),
        InfoNce(temperature=0.5, in_batch=False, pairs=True),
        Hinge(margin=9.0, hardest=False, in_batch=True, learns_keys=True),
        Hinge(margin=9.0, hardest=False, in_batch=True, learns_keys=False),
        Hinge(margin=9.0, hardest=False, in_batch=False, learns_keys=False),
    ],
)
@pytest.mark.parametrize("with_ids", [False, True])
def test_the_mask_removes_exactly_the_planted_false_negatives(contrast: Objective, with_ids: bool) -> None:
    ids = assigned(planted(with_ids=with_ids))
    assert ids.negative is not None
    num_pairs, num_negatives = len(ids.key), len(ids.negative)
    # With unit vectors as queries the gradient of key j holds the gradients of all its similarities.
    query = torch.eye(num_pairs, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    key, negatives = (
        torch.rand(count, num_pairs, dtype=torch.float64, generator=generator).requires_grad_()
        for count in (num_pairs, num_negatives)
    )
    contrast(query, key, StoreBatch().for_batch(ids, negatives), ids).backward()
    assert key.grad is not None
    assert negatives.grad is not None
    meets = torch.cat([key.grad, negatives.grad]).T != 0  # [queries, candidates]

    queries, documents, others = THINGS_BY_NAME if with_ids else THINGS_BY_TEXT
    pairs = set(zip(queries, documents, strict=True))
    for row, its_query in enumerate(queries):
        for column, candidate in enumerate(documents + others):
            is_met = getattr(contrast, "in_batch", True) or column >= num_pairs
            is_negative = is_met and (its_query, candidate) not in pairs
            assert bool(meets[row, column]) == (is_negative or row == column), (row, column)


@dataclass
class RecordingLoss:
    """A loss that records its stored negatives and ids."""

    contrast: Objective
    received: list[tuple[StoreBatch, ExampleIds]] = field(default_factory=list)

    def __call__(self, query: Tensor, key: Tensor | None, stored: StoreBatch, ids: ExampleIds) -> Tensor:
        self.received.append((stored, ids))
        return self.contrast(query, key, stored, ids)

    def collapsed_loss(self, *, batch_size: int, stored: StoreBatch) -> float | None:
        return self.contrast.collapsed_loss(batch_size=batch_size, stored=stored)


def test_a_queue_holds_documents_by_id_behind_the_negatives_of_the_batch() -> None:
    queue = {"negatives.store": "queue", "negatives.capacity": 40, "stages.0.batch_size": 8}
    config = small_config(settings=queue)
    rows = rows_of(config, clicks(24, num_negatives=[1, 0, 2]))
    learner = TrainState.build(config, towers_of(config), num_samples=None)
    store = build_store(config, None, None, CPU)
    watched = RecordingLoss(Clip(temperature=0.2))
    maker = ViewMaker.of(config, build_transform(config, vocabulary().tokenizer), CPU)
    documents: list[int] = []
    for step, views in enumerate(maker.views(rows.batches(8))):
        settings: dict[str, Any] = {"learning_rate": 0.1, "momentum": 0.0, "precision": "float32"}
        stepped = train_step(learner, store, watched, views, step=step, **settings)
        stored, ids = watched.received[-1]
        assert ids.negative is not None
        assert stored.negatives is not None
        assert stored.negative_id is not None
        assert ids.negative_name is not None
        assert stored.negative_name is not None
        assert stored.negative_name.tolist() == [*ids.negative_name.tolist(), *documents]
        # A queued document that also appears in the batch gets the batch's id.
        assert stored.negative_id.tolist() == ids.of(stored.negative_name).tolist()
        assert stored.negative_id[: len(ids.negative)].tolist() == ids.negative.tolist()
        num_candidates = 8 + len(ids.negative) + len(documents)
        assert stepped.collapsed_loss == pytest.approx((math.log(num_candidates) + math.log(8)) / 2)
        documents += ids.stored_key.tolist()
    assert len(watched.received) == 3


@pytest.mark.parametrize(("first", "second"), [(3, 7), (7, 3), (5, 5)])
def test_tokens_are_padded_to_the_longest_row_and_encode_as_they_would_alone(first: int, second: int) -> None:
    tower = towers_of(small_config("simcse")).eval()
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(1, 200, (4, length), generator=generator) for length in (first, second)]
    both = stacked(*tokens)
    assert both.shape == (8, max(first, second))
    assert both[:4, :first].equal(tokens[0])
    assert both[4:, :second].equal(tokens[1])
    assert int((both == 0).sum()) == 4 * abs(first - second)
    with torch.no_grad():
        assert torch.allclose(tower(both), torch.cat([tower(each) for each in tokens]), atol=1e-6)


def test_images_are_stacked_unchanged() -> None:
    images = torch.rand(2, 3, 4, 4)
    assert stacked(images, images).equal(images.repeat(2, 1, 1, 1))


# Images with captions


def test_captions_are_identified_by_the_shown_text_and_images_by_id() -> None:
    config = small_config("clip")
    captions = [TEXTS[:3], TEXTS[:3], [TEXTS[5]], TEXTS[5]]
    rows = rows_of(config, {"image": noise_images(4), "caption": captions})
    drawing = drawing_of(config)
    known_by = {}
    for epoch in range(20):
        batch = whole(rows, epoch=epoch)
        (known, _), tokens = drawing.ids_and_negatives(batch), drawing.view(batch, 1).on(CPU)
        assert known.query[:, 0].tolist() == [0, 1, 2, 3]
        assert known.negative is None
        for row, name in zip(tokens, known.key[:, 0].tolist(), strict=True):
            assert known_by.setdefault(name, row[row > 0].tolist()) == row[row > 0].tolist()
        assert drawing.view(batch, 0).on(CPU).shape == (4, 1, 8, 8)
        assert drawing.plain_key(batch).on(CPU)[0].equal(drawing.plain_key(batch).on(CPU)[1])
    assert len(known_by) == 4  # the three captions of two images, and the only caption of the others


# Document frequencies


def counted(rows: InMemoryDataset, *, explicit: bool) -> Any:
    settings = {"stages.0.loss": "clip", "stages.0.logq_correction": "simple", "negatives.explicit": explicit}
    return count_documents(small_config(settings=settings), rows, CPU)


def test_frequencies_are_log_shares_of_documents_and_negatives() -> None:
    config, values = small_config(), clicks(50, num_negatives=[2, 0, 3])
    texts = [*values["document"], *(text for row in values["negatives"] for text in row)]
    counts = Counter(texts)
    rows = rows_of(config, values)
    frequencies = counted(rows, explicit=True)
    known, _ = drawing_of(config).ids_and_negatives(whole(rows))
    assert known.negative is not None
    ids = torch.cat([known.key, known.negative])[:, 0]
    expected = torch.tensor([counts[text] / len(texts) for text in texts]).log()
    assert len(set(counts.values())) > 2
    assert torch.allclose(frequencies(ids), expected)
    assert frequencies(ids).dtype == torch.float32
    unknown = torch.tensor([int(ids.min()) - 1, int(ids.max()) + 1, 5])
    assert torch.allclose(frequencies(unknown), torch.tensor(1 / len(texts)).log())
    assert frequencies(ids[:0]).shape == (0,)


def test_unused_explicit_negatives_do_not_count() -> None:
    values = clicks(50, num_negatives=[2, 0, 3])
    rows = rows_of(small_config(), values)
    known = drawing_of(small_config()).ids_and_negatives(whole(rows))[0].key[:, 0]
    counts = Counter(values["document"])
    expected = torch.tensor([counts[text] / 50 for text in values["document"]]).log()
    assert torch.allclose(counted(rows, explicit=False)(known), expected)
    assert not torch.allclose(counted(rows, explicit=True)(known), expected)


def test_frequencies_of_an_empty_dataset_are_zero() -> None:
    nothing = counted(rows_of(small_config(), {"query": [], "document": []}), explicit=True)
    assert nothing(torch.tensor([3, 4])).tolist() == [0, 0]


# The temperature and the towers


def test_a_learned_temperature_that_starts_below_its_minimum_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"is at least 0.01, came 0.005; start there"):
        LearnedTemperature(0.005)
    assert LearnedTemperature(MIN_TEMPERATURE)().item() == pytest.approx(MIN_TEMPERATURE)
    small_config(settings={"learn_temperature": True, "stages.0.temperature": MIN_TEMPERATURE})
    small_config(settings={"learn_temperature": False, "stages.0.temperature": 0.005})


def test_the_temperature_is_clamped_to_its_minimum_after_the_step_and_keeps_learning() -> None:
    config = small_config(settings={"learn_temperature": True, "stages.0.temperature": 0.02})
    learner = TrainState.build(config, towers_of(config), num_samples=None)
    temperature = learner.temperature
    assert temperature is not None
    assert temperature().item() == pytest.approx(0.02)
    for slope, expected in ((5.0, MIN_TEMPERATURE), (5.0, MIN_TEMPERATURE), (-5.0, None)):
        learner.backward(slope * temperature())
        assert temperature.log_temperature.grad is not None
        assert float(temperature.log_temperature.grad) == pytest.approx(slope * temperature().item())
        before = temperature().item()
        for group in learner.optimizer.param_groups:
            group |= {"lr": 100.0, "momentum": 0.0}
        learner.update()
        if expected is None:
            assert temperature().item() > before
        else:
            assert temperature().item() == pytest.approx(expected)


def test_a_shared_tower_has_each_parameter_once() -> None:
    shared, separate = small_config(), small_config(settings={"separate_towers": True})
    one, two = towers_of(shared), towers_of(separate)
    assert (len(one.towers), len(two.towers)) == (1, 2)
    assert one.key_tower is one.query
    assert two.key_tower is two.key
    assert len(list(two.parameters())) == 2 * len(list(one.parameters()))
    assert not any(name.startswith("key.") for name in one.state_dict())
    assert {name.replace("key.", "query.", 1) for name in two.state_dict()} == set(one.state_dict())
    groups = TrainState.build(shared, one, num_samples=None).optimizer.param_groups
    learned = [each for group in groups for each in group["params"]]
    assert len({id(each) for each in learned}) == len(learned) == len(list(one.parameters()))
    # Changing one side of a shared tower changes both.
    with torch.no_grad():
        for each in (one, two):
            for parameter in each.query.parameters():
                parameter.add_(torch.arange(parameter.numel()).view_as(parameter) % 3)
        tokens = torch.tensor([[5, 6], [7, 0]])
        assert torch.equal(*one(tokens, tokens))
        assert not torch.allclose(*two(tokens, tokens))


# The evaluator


class Angles(nn.Module):
    """Encodes known texts as unit vectors in the plane, given by angles in degrees."""

    def __init__(self, degrees: dict[str, float]) -> None:
        super().__init__()
        tokens = vocabulary().tokenizer.encode(list(degrees), 10)
        self._degrees = {tuple(row.tolist()): at for row, at in zip(tokens, degrees.values(), strict=True)}

    def forward(self, tokens: Tensor) -> Tensor:
        texts = [tuple(token for token in row if token) for row in tokens.tolist()]
        angles = torch.tensor([self._degrees[text] for text in texts]).deg2rad()
        return torch.stack([angles.cos(), angles.sin()], dim=1)


def test_the_evaluator_counts_keys_among_the_nearest_as_computed_by_hand() -> None:
    queries = {"q first": 0.0, "q tenth": 90.0, "q eleventh": 180.0, "q known": 270.0}
    documents = {"d first": 1.0, "d tenth": 100.0, "d eleventh": 195.0, "d known": 275.0}
    copied = {"copied": 91.0}
    after = {f"{number} after 91": 91.0 + number for number in range(1, 9)}
    near = {f"{number} near 180": 180.0 + number for number in range(1, 11)}
    # "copied" would push out "d tenth" if it counted more than once.
    bank = ["copied"] * 12 + [*after, *near, "d known", "d first"]
    config = small_config()
    judge = RetrievalEvaluator(
        bank=rows_of(config, {"query": ["unheard"] * len(bank), "document": bank}),
        test=rows_of(config, {"query": list(queries), "document": list(documents)}),
        transform=PairTransform(),
    )
    tower = Tower(Angles(queries | documents | copied | after | near), nn.Sequential())
    measures = judge.measure(TwoTowers(tower, tower), CPU)
    assert list(measures) == ["recall_at_10", "recall_at_1"]
    assert measures == {"recall_at_10": pytest.approx(3 / 4), "recall_at_1": pytest.approx(2 / 4)}


@pytest.mark.parametrize("has_ids", [False, True])
def test_another_text_of_a_document_is_the_document(has_ids: bool) -> None:
    queries = {"q one again": 0.0, "q two": 90.0}
    documents = {"d one": 40.0, "d two": 95.0}
    others = {"d one again": 1.0} | {f"{number} more": 90.0 + number / 10 for number in range(12)}
    ids = {"query_id": ["1", "2"], "document_id": ["a", "b"]} if has_ids else {}
    more = {"query_id": list("3" * 13), "document_id": ["a", *"c" * 12]} if has_ids else {}
    config = small_config()
    judge = RetrievalEvaluator(
        bank=rows_of(config, {"query": ["unheard"] * 13, "document": list(others), **more}),
        test=rows_of(config, {"query": list(queries), "document": list(documents), **ids}),
        transform=PairTransform(),
        tokenizer=vocabulary().tokenizer,
    )
    tower = Tower(Angles(queries | documents | others), nn.Sequential())
    # With ids, "d one again" is the document of "q one again", and the twelve nearest texts of "q two" are one document.
    found = judge.measure(TwoTowers(tower, tower), CPU)
    assert found == {"recall_at_10": 1.0 if has_ids else 0.5, "recall_at_1": 0.5 * has_ids}
    assert judge.baseline(CPU) == {"baseline_recall_at_10": 1.0, "baseline_recall_at_1": 0.5 + 0.5 * has_ids}


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 1_000))
def test_the_evaluator_agrees_with_a_comparison_of_all_pairs(seed: int) -> None:
    config = small_config(settings={"separate_towers": True, "encoder.kwargs": BAG})
    towers = towers_of(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in towers.parameters():
            parameter += torch.randn(parameter.shape, generator=generator)
    values = clicks(60, num_negatives=[0], seed=seed)
    rows = rows_of(config, {role: values[role] for role in ("query", "document")})
    test, bank = rows.where(lambda ids: ids < 25), rows.where(lambda ids: ids >= 25)
    found = RetrievalEvaluator(bank=bank, test=test, transform=PairTransform()).measure(towers, CPU)
    assert towers.training

    towers.eval()
    batch = whole(rows)
    with torch.no_grad():
        query = towers.query(torch.from_numpy(tokens_of(batch, "query").padded()))[:25]
        texts = list(dict.fromkeys(values["document"]))
        first = [values["document"].index(text) for text in texts]
        key = towers.key_tower(torch.from_numpy(tokens_of(batch, "document").padded()))[first]
    order = (query @ key.T).argsort(dim=1, descending=True)
    places = [order[row].tolist().index(texts.index(values["document"][row])) for row in range(25)]
    for k in (1, 10):
        assert found[f"recall_at_{k}"] == pytest.approx(sum(place < k for place in places) / 25)


class Numbers(nn.Module):
    """Encodes each known input as the angle assigned to it."""

    def __init__(self, number_of: dict[bytes, int]) -> None:
        super().__init__()
        self._number_of = number_of

    def forward(self, inputs: Tensor) -> Tensor:
        return torch.eye(10)[[self._number_of[bytes_of(row)] for row in inputs]]


def bytes_of(row: Tensor) -> bytes:
    """Return bytes that identify an input; tokens without their padding."""
    return (row[row > 0] if row.dtype == torch.int64 else row).numpy().tobytes()


def test_images_are_evaluated_by_the_caption_that_is_embedded() -> None:
    config, numbers = small_config("clip"), [row % 10 for row in range(40)]
    captions = [[f"the digit {number}", f"a {number} by hand", f"{number} again"] for number in numbers]
    rows = rows_of(config, {"image": noise_images(40), "caption": captions})
    drawing, batch = drawing_of(config), whole(rows)
    image, caption = (
        Tower(Numbers(dict(zip(map(bytes_of, inputs), numbers, strict=True))), nn.Sequential())
        for inputs in (drawing.plain(batch).on(CPU), drawing.plain_key(batch).on(CPU))
    )
    test, bank = rows.where(lambda ids: ids < 20), rows.where(lambda ids: ids >= 20)
    judge = RetrievalEvaluator(bank=bank, test=test, transform=drawing)
    assert judge.measure(TwoTowers(image, caption), CPU) == {"recall_at_10": 1.0, "recall_at_1": 1.0}


def test_the_frequency_and_the_id_of_a_document_do_not_depend_on_its_batch() -> None:
    config = small_config()
    documents = {"query": ["one", "two", "three"], "document": TEXTS[:3], "document_id": ["7", "7", "8"]}
    together = assigned(drawing_of(config).ids_and_negatives(whole(rows_of(config, documents)))[0])
    assert together.key[0] == together.key[1] != together.key[2]
    for row in range(3):
        alone = {role: values[row : row + 1] for role, values in documents.items()}
        ids = assigned(drawing_of(config).ids_and_negatives(whole(rows_of(config, alone)))[0])
        assert ids.stored_key[0] == together.stored_key[row]
        # A queue returns the same document under this id from an earlier step.
        assert together.of(ids.stored_key)[0] == together.key[row]
