"""Negatives mined for captioned images and for sentences, against plain searches in float64."""

from collections.abc import Iterator
from itertools import chain
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from raycl.config import RunConfig
from raycl.data.in_memory import Batch, InMemoryDataset, pixels_of, texts_of
from raycl.data.matches import SPARE
from raycl.losses.example_ids import ExampleIds, IdExchange
from raycl.losses.objective import StoreBatch, build_objective
from raycl.models.build import build_towers
from raycl.models.registry import SideName
from raycl.models.towers import TwoTowers
from raycl.training.corpus import (
    Built,
    Images,
    build_corpus_of_captions,
    build_corpus_of_sentences,
)
from raycl.training.encoder_pool import Encoded
from raycl.training.mined import MinedNegatives, MinedTable
from raycl.training.miner import CorpusEncoder, Rows, Search
from raycl.training.train_state import EmbedConfig, TrainState
from raycl.training.transforms import TextTransform, Transform, build_transform
from raycl.training.views import ViewMaker
from tests.pairs import noise_images, rows_of, small_config, vocabulary
from tests.test_mined import LocalBank, numpy_weights
from tests.texts import invented_texts

pytestmark = pytest.mark.usefixtures("one_thread", "process_settings")

NUM_ROWS, CANDIDATES, NUM = 40, 6, 2
RECIPES = {"clip": "caption", "simcse": "text"}  # the role of their texts


def config_of(name: str, **settings: Any) -> RunConfig:
    mined = {"negatives.mined.num": NUM, "negatives.mined.candidates": CANDIDATES}
    return small_config(name, mined | settings)


def lists(num_rows: int = NUM_ROWS) -> list[list[str]]:
    """Return one to three texts of each row; some rows share one."""
    random, texts = Random(0), iter(invented_texts(4 * num_rows, seed=3))
    rows = [[next(texts) for _ in range(1 + number % 3)] for number in range(num_rows)]
    for row in rows[::5]:
        row[-1] = random.choice(random.choice(rows))
    return rows


def held_rows(name: str, texts: list[list[str]]) -> InMemoryDataset:
    images = {"image": noise_images(len(texts))} if name == "clip" else {}
    return rows_of(config_of(name), {**images, RECIPES[name]: texts})


def corpus_of(name: str, rows: InMemoryDataset) -> Built:
    if name == "clip":
        return build_corpus_of_captions(rows, lambda: rows)
    return build_corpus_of_sentences(rows)


@pytest.mark.parametrize("name", RECIPES)
def test_a_step_embeds_the_mined_texts_of_its_batch_with_gradients(name: str) -> None:
    rows, config, cpu = lists(), config_of(name), torch.device("cpu")
    data = held_rows(name, rows)
    built = corpus_of(name, data)
    mined = mined_of(built, any_table(built))
    transform = build_transform(config, vocabulary().tokenizer, None, mined)
    (views,) = ViewMaker.of(config, transform, cpu).views(iter([data.take(np.arange(10), epoch=1)]))
    towers = trained(config)
    state = TrainState.build(config, towers, num_samples=None)
    state.set_embed_config(EmbedConfig.of(config, config.stages[0]))
    state.wrap_ddp(cpu)
    embedded = state.embed(views, step=0)
    assert embedded.negatives is not None
    assert embedded.key is not None
    tower = towers.key_tower if isinstance(towers, TwoTowers) else towers
    for rows_of_side, expected in ((embedded.key, views.view_b), (embedded.negatives, views.negatives)):
        torch.testing.assert_close(rows_of_side, tower(expected))
    assert len(embedded.negatives) == NUM * 10
    embedded.negatives.sum().backward()
    assert any(each.grad is not None and each.grad.abs().sum() > 0 for each in tower.parameters())


def test_the_images_of_a_block_are_found_by_id_without_a_copy_of_all_ids() -> None:
    largest = []

    class Ids(np.ndarray):
        def __getitem__(self, key: Any) -> Any:
            found = super().__getitem__(key)
            largest.append(np.size(found))
            return found

    rows = held_rows("clip", lists())
    backwards = rows.where(lambda ids: np.ones(len(ids), np.bool_))
    backwards._place, backwards.sample_id = rows._place[::-1], rows.sample_id[::-1].view(Ids)
    images = Images(lambda: backwards, rows.sample_id[3:])
    images.take(np.array([0]))
    largest.clear()
    found = images.take(np.array([5, 0, 5]))
    assert found.sample_id.tolist() == rows.sample_id[[8, 3, 8]].tolist()
    np.testing.assert_array_equal(pixels_of(found).images, pixels_of(rows.take(np.array([8, 3, 8]))).images)
    assert max(largest) == 3


def trained(config: RunConfig) -> Any:
    """Return towers whose BatchNorm has statistics of its own."""
    towers = build_towers(config, vocabulary())
    with torch.no_grad():
        for each in towers.modules():
            if isinstance(each, torch.nn.BatchNorm2d):
                each.running_mean.uniform_(-0.5, 0.5)  # pyright: ignore[reportOptionalMemberAccess]
    return towers.eval()


def table_of(config: RunConfig, built: Built, network: Any, **settings: Any) -> MinedTable:
    encoder = CorpusEncoder(config, vocabulary())
    encoder.load(numpy_weights(network))

    def encode(side: SideName, blocks: Iterator[Rows]) -> Iterator[Encoded]:
        return (Encoded(encoder.encode(rows, side=side), 7, 1) for rows in blocks)

    bank: Any = LocalBank(built.corpus.bank_id, config.projection_head.dim)
    mined = config.negatives.mined.model_copy(update=settings)
    search = Search(mined, bank, built.corpus.bank_id, encode)
    search.use(*built)
    search.embed_documents()
    return search.mine()


def meanings(rows: list[list[str]]) -> dict[str, set[str]]:
    """Return all texts that mean the same as each one: texts of a row, and of rows that share a text."""
    same: dict[str, set[str]] = {}
    for row in rows:
        group = set(row).union(*(same.get(text, ()) for text in row))
        same |= dict.fromkeys(group, group)
    return same


@torch.no_grad()
def plain_table(
    name: str, rows: list[list[str]], network: Any, max_relative_score: float
) -> dict[tuple[int, int], list[str]]:
    """Return the hard negatives of each row and text of the row, by a sort of all similarities in float64."""
    config, network, images = config_of(name), network.double(), torch.empty(0)
    texts = list(dict.fromkeys(chain.from_iterable(rows)))
    data = held_rows(name, [[text] for text in texts])
    if name == "clip":
        assert isinstance(network, TwoTowers)
        images = torch.cat(
            [
                network.query(
                    build_transform(config, vocabulary().tokenizer)
                    .plain(batch)
                    .on(torch.device("cpu"))
                    .double()
                )
                for batch in held_rows(name, rows).batches(1)
            ]
        )
    tower = network.key_tower if name == "clip" else network
    tokens = [texts_of(batch, RECIPES[name]).tokens for batch in data.batches(1)]
    document = {
        text: tower(torch.from_numpy(each.padded()))[0] for text, each in zip(texts, tokens, strict=True)
    }
    same, found = meanings(rows), {}
    for number, row in enumerate(rows):
        for place, text in enumerate(row):
            query = images[number] if name == "clip" else document[text]
            positive = text if name == "clip" else row[(place + 1) % len(row)]
            own = set(row) if name == "clip" else same[text]
            limit = max_relative_score * float(query @ document[positive])
            cosine = {other: float(query @ row_of) for other, row_of in document.items() if other not in own}
            nearest = sorted(cosine, key=lambda other: -cosine[other])[: CANDIDATES + SPARE]
            near = [other for other in nearest if cosine[other] <= limit]
            if name == "simcse":  # one sentence of each meaning
                near = [other for at, other in enumerate(near) if not same[other] & set(near[:at])]
            found[number, place] = near[:CANDIDATES]
    return found


def text_ids(name: str, rows: list[list[str]]) -> dict[int, str]:
    """Return each text by its id."""
    texts = list(chain.from_iterable(rows))
    tokens = texts_of(held_rows(name, [texts] * 1).take(np.array([0])), RECIPES[name]).tokens
    return dict(zip(tokens.text_id.tolist(), texts, strict=True))


@pytest.mark.parametrize("max_relative_score", [1.0, 0.9])
@pytest.mark.parametrize("name", RECIPES)
def test_a_table_holds_the_nearest_texts_of_other_rows_of_a_plain_search_in_float64(
    name: str, max_relative_score: float
) -> None:
    rows, config = lists(), config_of(name)
    built = corpus_of(name, held_rows(name, rows))
    corpus, network = built.corpus, trained(config)
    table = table_of(config, built, network, max_relative_score=max_relative_score)
    names = text_ids(name, rows)
    got = {}
    for number, row in enumerate(rows):
        for place in range(len(row)):
            (pair,) = corpus.pairs_of(np.array([number]), np.array([place]))
            documents = table.document[pair]
            got[number, place] = [
                names[each] for each in corpus.document.text_id[documents[documents >= 0]].tolist()
            ]
    expected = plain_table(name, rows, network, max_relative_score)
    assert got == expected
    assert sum(map(len, got.values())) > len(got)
    for (number, _), mined in got.items():
        assert not set(mined) & set(rows[number])


def mined_of(built: Built, table: MinedTable | None, **settings: Any) -> MinedNegatives:
    mined = config_of("clip", **settings).negatives.mined
    negatives = MinedNegatives(built.corpus, mined, seed=0)
    negatives.use(table)
    return negatives


def any_table(built: Built) -> MinedTable:
    """Return a table of documents that match no query of the pair, other ones for each pair."""
    corpus = built.corpus
    document = np.full((len(corpus.positive), CANDIDATES), -1, np.int32)
    for pair, (query, _) in enumerate(corpus.positive):
        others = np.setdiff1d(np.arange(len(corpus.document)), corpus.matches_of(query))
        document[pair] = np.roll(others, -7 * pair)[:CANDIDATES]
    return MinedTable(document=document, step=np.full_like(document, 3), query_step=3)


def shown_texts(transform: Transform, name: str, batch: Batch, number: int) -> list[int]:
    text: Any = transform.caption if name == "clip" else transform  # type: ignore[attr-defined]
    return text.shown(batch, number).text_id.tolist()


@pytest.mark.parametrize("random_fraction", [0.0, 0.5])
@pytest.mark.parametrize("name", RECIPES)
def test_each_row_gets_candidates_of_the_text_it_shows_and_never_its_own_texts(
    name: str, random_fraction: float
) -> None:
    rows = lists()
    data = held_rows(name, rows)
    built = corpus_of(name, data)
    table, corpus, names = any_table(built), built.corpus, text_ids(name, rows)
    mined = mined_of(built, table, **{"negatives.mined.random_fraction": random_fraction})
    transform = build_transform(config_of(name), vocabulary().tokenizer, None, mined)
    same = {text: set(row) for row in rows for text in row} if name == "clip" else meanings(rows)
    seen, fractions = set[int](), []
    for epoch in range(30):
        batch = data.take(np.arange(0, NUM_ROWS, 2), epoch=epoch)
        ids, negatives = transform.ids_and_negatives(batch)
        assert ids.negative is not None
        assert negatives is not None
        drawn = ids.negative[:, 0].reshape(len(batch), NUM).tolist()
        fractions.append(mined.metrics(step=5)["mined_random_fraction"])
        shown = shown_texts(transform, name, batch, int(name == "clip"))
        for number, text, documents, tokens in zip(
            batch.sample_id.tolist(), shown, drawn, negatives.reshape(len(batch), NUM, -1), strict=True
        ):
            own = set(rows[number]) if name == "clip" else same[names[text]]
            assert not own & {names[each] for each in documents}
            place = [names[text] == each for each in rows[number]].index(True)
            (pair,) = corpus.pairs_of(np.array([number]), np.array([place]))
            candidates = corpus.document.text_id[table.document[pair]].tolist()
            if not random_fraction:
                assert set(documents) <= set(candidates)
                assert len(set(documents)) == NUM
            seen.add(pair)
            for each, row in zip(documents, tokens, strict=True):
                place = corpus.document.text_id.tolist().index(each)
                length = corpus.document.lengths[place]
                assert row[:length].tolist() == corpus.document.take(np.array([place])).values.tolist()
                assert not row[length:].any()
    assert len(seen) > NUM_ROWS / 2  # several texts of a row were shown
    assert np.mean(fractions) == pytest.approx(random_fraction, abs=0.1)


@pytest.mark.parametrize("name", RECIPES)
def test_mined_texts_change_as_the_words_of_views_do_each_on_its_own(name: str) -> None:
    rows = lists()
    data = held_rows(name, rows)
    built = corpus_of(name, data)
    mined = mined_of(built, any_table(built))
    config = config_of(name, **{"text_augment.deletion": 0.5})
    transform = build_transform(config, vocabulary().tokenizer, None, mined)
    batch = data.take(np.arange(20), epoch=4)
    _, changed = transform.ids_and_negatives(batch)
    plain = built.corpus.document.take(mined._last.document)
    assert changed is not None
    text: Any = transform.caption if name == "clip" else transform  # type: ignore[attr-defined]
    assert isinstance(text, TextTransform)
    for row in range(20):
        for each in range(NUM):
            number = np.array([row * NUM + each])
            alone = text._augmentation(
                plain.take(number).padded(), batch.sample_id[[row]], seed=config.seed, epoch=4, view=2 + each
            )[0]
            assert changed[number[0]][: len(alone)].tolist() == alone.tolist()
            assert not changed[number[0]][len(alone) :].any()
    assert (changed > 0).sum() < 0.8 * len(plain.values)


def masked(ids: ExampleIds, others: torch.Tensor) -> list[list[bool]]:
    """Return whether each candidate, by its id, is masked for each query of the batch."""
    pairs = set(zip(ids.query.tolist(), ids.key.tolist(), strict=True))
    return [[(query, other) in pairs for other in others.tolist()] for query in ids.query.tolist()]


@pytest.mark.parametrize(
    ("name", "num_known"), [("clip", NUM_ROWS), ("simcse", NUM_ROWS), ("simcse", NUM_ROWS // 2)]
)
def test_a_mined_text_is_no_negative_of_any_row_that_has_it(name: str, num_known: int) -> None:
    rows = lists()
    for number in range(1, 31, 3):  # a text of ten rows
        rows[number][-1] = rows[1][-1]
    data = held_rows(name, rows)
    if num_known < NUM_ROWS:  # a stream was read as far
        built = build_corpus_of_sentences(held_rows(name, rows[:num_known]), first_only=True)
    else:
        built = corpus_of(name, data)
    names, same, random = text_ids(name, rows), meanings(rows), np.random.default_rng(0)
    mined = mined_of(built, any_table(built), **{"negatives.mined.random_fraction": 0.5})
    mined_transform = build_transform(config_of(name), vocabulary().tokenizer, None, mined)
    plain_transform = build_transform(config_of(name), vocabulary().tokenizer)
    num_shared = 0
    for epoch in range(40):
        batch = data.take(np.sort(random.permutation(NUM_ROWS)[:16]), epoch=epoch)
        given, plain = (each.ids_and_negatives(batch)[0] for each in (mined_transform, plain_transform))
        ids, plain = (IdExchange(torch.device("cpu")).start(each)() for each in (given, plain))
        assert given.negative is not None
        assert ids.negative is not None
        drawn = [names[each] for each in given.negative[:, 0].tolist()]
        for number, of_row in zip(batch.sample_id.tolist(), masked(ids, ids.negative), strict=True):
            own, alike = set(rows[number]), set[str]().union(*(same[text] for text in rows[number]))
            assert own & set(drawn) <= {
                text for text, is_masked in zip(drawn, of_row, strict=True) if is_masked
            }
            assert alike >= {text for text, is_masked in zip(drawn, of_row, strict=True) if is_masked}
            num_shared += sum(text in own and text not in rows[number][:-1] for text in drawn)
    assert num_shared > 0


@pytest.mark.parametrize("name", RECIPES)
def test_rows_that_share_a_text_are_no_duplicates_unless_it_is_shown_or_mined(name: str) -> None:
    rows = [[f"{row} one", f"{row} two", "both"] for row in ("a", "b")] + [["c one"], ["d one"]]
    data = held_rows(name, rows)
    built = corpus_of(name, data)
    texts = [text_ids(name, rows)[each] for each in built.corpus.document.text_id.tolist()]
    transform, epochs = build_transform(config_of(name), vocabulary().tokenizer), range(12)
    batches = [data.take(np.arange(3), epoch=epoch) for epoch in epochs]
    plain = [
        IdExchange(torch.device("cpu")).start(transform.ids_and_negatives(each)[0])() for each in batches
    ]
    assert {masked(ids, ids.key)[0][1] for ids in plain} == {False, True}
    for text in ("d one", "both"):
        document = np.full((len(built.corpus.positive), CANDIDATES), texts.index(text), np.int32)
        mined = mined_of(built, MinedTable(document=document, step=np.zeros_like(document), query_step=0))
        transform = build_transform(config_of(name), vocabulary().tokenizer, None, mined)
        for batch, without in zip(batches, plain, strict=True):
            ids = IdExchange(torch.device("cpu")).start(transform.ids_and_negatives(batch)[0])()
            assert ids.negative is not None
            is_own = text == "both"
            assert masked(ids, ids.negative) == [[is_own] * 3 * NUM] * 2 + [[False] * 3 * NUM]
            if not is_own:
                assert masked(ids, ids.key) == masked(without, without.key)


@pytest.mark.parametrize("loss", ["info_nce", "clip", "hinge"])
@pytest.mark.parametrize("name", RECIPES)
def test_a_mined_text_of_another_row_in_the_batch_is_no_negative_of_that_row(name: str, loss: str) -> None:
    if name == "simcse" and loss == "clip":
        return  # it compares two towers
    rows = [[f"{row} {text}" for text in ("one", "two", "three")] for row in ("a", "b", "c", "d")]
    data = held_rows(name, rows)
    built = corpus_of(name, data)
    corpus, names = built.corpus, text_ids(name, rows)
    others = {
        text: number for number, text in enumerate(names[each] for each in corpus.document.text_id.tolist())
    }
    document = np.array(
        [[others[rows[(row + 1) % 4][text]]] for row in range(4) for text in range(3)], np.int32
    )
    table = MinedTable(
        document=np.tile(document, CANDIDATES), step=np.zeros((12, CANDIDATES), np.int32), query_step=0
    )
    assert corpus.positive[corpus.pairs_of(np.arange(4)), 0].tolist() == sorted(
        corpus.positive[::3, 0].tolist()
    )
    mined = mined_of(built, table, **{"negatives.mined.num": 1})
    transform = build_transform(config_of(name), vocabulary().tokenizer, None, mined)
    objective = build_objective(
        loss, hinge_weight=0.0, temperature=0.5, margin=2.0, in_batch=True, pairs=name == "clip"
    )
    generator = torch.Generator().manual_seed(0)
    query, key = torch.nn.functional.normalize(torch.randn(2, 4, 8, generator=generator), dim=2)
    num_unshown = 0
    for epoch in range(12):
        batch = data.take(np.arange(4), epoch=epoch)
        given, _ = transform.ids_and_negatives(batch)
        assert given.negative is not None
        ids = IdExchange(torch.device("cpu")).start(given)()
        # Each row's negative is the text of the next row, and equals that row's query: a false negative of it alone.
        negatives = query.roll(-1, 0)
        stored = StoreBatch().for_batch(ids, negatives)
        got = objective(query, key, stored, ids)
        assert got == pytest.approx(plain_loss(loss, query, key, negatives), rel=1e-5)
        shown = {each for view in (0, 1) for each in shown_texts(transform, name, batch, view)}
        num_unshown += len(set(given.negative[:, 0].tolist()) - shown)
    assert num_unshown > 0


def plain_loss(loss: str, query: torch.Tensor, key: torch.Tensor, negatives: torch.Tensor) -> float:
    """Return the loss of queries whose candidates are all keys, and the negatives of all rows but the one before."""
    query, key, negatives = query.double(), key.double(), negatives.double()
    losses = []
    for row in range(4):
        others = [negatives[each] for each in range(4) if (each + 1) % 4 != row]
        candidates = torch.stack([key[row], *(key[each] for each in range(4) if each != row), *others])
        similarity = candidates @ query[row]
        if loss == "hinge":
            back = torch.stack([query[each] for each in range(4) if each != row]) @ key[row]
            means = [(2.0 - similarity[0] + each).clamp(min=0).mean() for each in (similarity[1:], back)]
            losses.append((means[0] + means[1]) / 2)
        else:
            to_keys = -(similarity / 0.5).log_softmax(0)[0]
            to_queries = -(query @ key[row] / 0.5).log_softmax(0)[row]
            losses.append((to_keys + to_queries) / 2 if loss == "clip" else to_keys)
    return float(torch.stack(losses).mean())
