"""Negatives mined during training: the corpus, the search with a frozen encoder, and the draws of a batch."""

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, patch

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ray.exceptions import ActorDiedError, RayError

from raycl.config.overrides import override
from raycl.config.schema import MinedConfig
from raycl.data.ids import entity_id
from raycl.data.in_memory import InMemoryDataset, tokens_of
from raycl.data.matches import SPARE
from raycl.data.texts import Tokens
from raycl.errors import ConfigError, RunError
from raycl.evaluation.search import search
from raycl.inference.mining import _Pairs
from raycl.inference.reading import Values
from raycl.models.build import build_towers
from raycl.models.registry import SideName
from raycl.models.towers import TwoTowers
from raycl.negatives import MemoryBank, Negatives
from raycl.negatives.search import Neighbors, merge, nearest
from raycl.negatives.spec import BankSpec
from raycl.training import miner as miner_module
from raycl.training import mining
from raycl.training.corpus import Built, Corpus, build_corpus
from raycl.training.driver import check_cluster
from raycl.training.encoder_pool import Encoded
from raycl.training.mined import MinedNegatives, MinedTable
from raycl.training.miner import CorpusEncoder, Miner, MinerUpdate, Rows, Search
from raycl.training.mining import MinerClient, start_miner
from raycl.training.stores import bank_spec
from raycl.training.transforms import PairTransform
from tests.pairs import clicks, rows_of, small_config, vocabulary
from tests.test_encoder_pool import give_a_noisy_core
from tests.test_mining import exclusions, joined

pytestmark = pytest.mark.usefixtures("one_thread", "process_settings")

NUM_ROWS, CANDIDATES = 60, 6
ROWS = clicks(NUM_ROWS, num_negatives=[0, 2, 1])
CONFIG = small_config(settings={"negatives.mined.num": 2, "negatives.mined.candidates": CANDIDATES})


class LocalBank:
    """A bank of one shard in this process."""

    def __init__(self, bank_id: NDArray[np.int64], dim: int = 16) -> None:
        self.ids = np.sort(bank_id)
        settings: dict[str, Any] = {"dim": dim, "capacity": len(self.ids), "momentum": 0.0}
        self.spec = BankSpec(name="local", kind="memory_bank", output="/", **settings)
        self.begin()

    def begin(self) -> None:
        self.store = MemoryBank(self.ids, self.spec.dim, seed=0, momentum=0.0)

    def replace(self, slots: Any, sample_id: Any, rows: Any, step: int) -> None:
        assert np.array_equal(self.store.slots_of(sample_id), slots)
        self.store.replace(sample_id, rows, step)

    def get(self, sample_id: NDArray[np.int64]) -> Negatives:
        return self.store.get(sample_id)

    def nearest(self, query: Any, k: int) -> list[Neighbors]:
        found = nearest(self.store.negatives(), query, k, without=None)
        return [merge([each], k) for each in found]


def held_rows(values: dict[str, list[Any]] = ROWS) -> InMemoryDataset:
    return rows_of(CONFIG, values)


def towers(seed: int = 0) -> TwoTowers:
    built = build_towers(CONFIG.model_copy(update={"seed": seed}), vocabulary())
    assert isinstance(built, TwoTowers)
    return built.eval()


def text_ids(texts: Sequence[str], role: str) -> list[int]:
    """Return the ids that a run gives to texts in this role."""
    rows = rows_of(CONFIG, {"query": texts, "document": texts})
    return tokens_of(rows.take(np.arange(len(texts))), role).text_id.tolist()


def numpy_weights(network: TwoTowers) -> dict[str, NDArray[Any]]:
    return {name: value.numpy() for name, value in network.state_dict().items()}


def search_of(built: Built, bank: Any, weights: dict[str, NDArray[Any]], **settings: Any) -> Search:
    """Return a search with one encoder, at step 7."""
    encoder = CorpusEncoder(CONFIG, vocabulary())
    encoder.load(weights)

    def encode(side: SideName, blocks: Iterator[Rows]) -> Iterator[Encoded]:
        return (Encoded(encoder.encode(texts, side=side), 7, 1) for texts in blocks)

    mined = CONFIG.negatives.mined.model_copy(update=settings)
    found = Search(mined, bank, built.corpus.bank_id, encode)
    found.use(*built)
    return found


@torch.no_grad()
def embedded(texts: Sequence[str], network: TwoTowers, *, of_queries: bool) -> torch.Tensor:
    batch = rows_of(CONFIG, {"query": texts, "document": texts}).take(np.arange(len(texts)))
    tower, role = (network.query, "query") if of_queries else (network.key_tower, "document")
    rows = [
        tower(torch.from_numpy(tokens_of(batch, role).take(np.array([each])).padded()))
        for each in range(len(texts))
    ]
    return torch.cat(rows)


@pytest.mark.parametrize("max_relative_score", [1.0, 0.9])
def test_the_miner_finds_the_negatives_of_raycl_mine_with_the_same_encoder(max_relative_score: float) -> None:
    built, network = build_corpus(held_rows(), explicit=True), towers()
    bank = LocalBank(built.corpus.bank_id)
    search_in_bank = search_of(built, bank, numpy_weights(network), max_relative_score=max_relative_score)
    search_in_bank.embed_documents()
    table = search_in_bank.mine()
    numbers = {"query_id", "document_id"}
    by_role = {
        role: [
            [entity_id(each) for each in value]
            if role == "negative_ids"
            else entity_id(value)
            if role in numbers
            else value
            for value in values
        ]
        for role, values in ROWS.items()
    }
    pairs = _Pairs(Values(by_role=by_role, label=np.full(NUM_ROWS, -1)))
    query = embedded(pairs.query.texts, network, of_queries=True)
    document = embedded(pairs.document.texts, network, of_queries=False)
    ranking = search(query, document, k=CANDIDATES + SPARE, **exclusions(pairs))
    own = (query[pairs.known.positive[:, 0]] * document[pairs.known.positive[:, 1]]).sum(1).numpy()
    written, mined = joined(pairs.with_mined(ranking, own, CANDIDATES, max_relative_score))
    assert min(mined.num_negatives, mined.num_too_near) > NUM_ROWS
    expected = {}
    for number, row in enumerate(written.to_pylist()):
        limits = {"num_negatives": 0, "max_relative_score": 1.0}
        num_explicit = len(pairs.known.hard_negatives(number, [], 1.0, **limits).explicit)
        (q,), (d,) = text_ids([row["query"]], "query"), text_ids([row["document"]], "document")
        expected[q, d] = text_ids(row["negatives"], "document")[num_explicit:]
    corpus = built.corpus
    assert isinstance(corpus.query, Tokens)
    names = corpus.document.text_id
    got = {
        (int(corpus.query.text_id[q]), int(names[d])): names[row[row >= 0]].tolist()
        for (q, d), row in zip(corpus.positive, table.document, strict=True)
    }
    assert got == expected
    assert np.array_equal(table.step >= 0, table.document >= 0)
    assert set(table.step[table.step >= 0].tolist()) == {7}


def test_a_table_holds_the_nearest_documents_of_a_plain_search_in_float64() -> None:
    rows = {role: ROWS[role] for role in ("query", "document")}
    built, network = build_corpus(held_rows(rows), explicit=True), towers()
    corpus = built.corpus
    bank = LocalBank(corpus.bank_id)
    search_in_bank = search_of(built, bank, numpy_weights(network), max_relative_score=1.0)
    search_in_bank.embed_documents()
    table = search_in_bank.mine()
    assert isinstance(corpus.query, Tokens)
    query, document = network.double()(
        torch.from_numpy(corpus.query.padded()), torch.from_numpy(corpus.document.padded())
    )
    similarity = (query @ document.T).detach().numpy()
    for (q, d), found in zip(corpus.positive, table.document, strict=True):
        below = [
            place
            for place in np.argsort(-similarity[q], kind="stable").tolist()
            if place not in corpus.matches_of(q).tolist()
        ][: CANDIDATES + SPARE]
        expected = [place for place in below if similarity[q, place] <= similarity[q, d]][:CANDIDATES]
        assert found[found >= 0].tolist() == expected


def test_long_texts_are_embedded_in_smaller_blocks_so_that_a_slow_encoder_answers_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit, built, blocks = 30, build_corpus(held_rows(), explicit=True), list[Tokens]()
    bank = LocalBank(built.corpus.bank_id)
    search_in_bank = search_of(built, bank, numpy_weights(towers()))
    encode = search_in_bank._encode

    def note(side: SideName, texts: Iterator[Rows]) -> Iterator[Encoded]:
        blocks.extend(each for each in texts if isinstance(each, Tokens))
        return encode(side, iter(blocks))

    monkeypatch.setattr(miner_module, "_BLOCK_TOKENS", limit)
    search_in_bank._encode = note
    search_in_bank.embed_documents()
    sums = [int(each.lengths.sum()) for each in blocks]
    assert len(blocks) > 2
    assert all(total <= limit or len(each.lengths) == 1 for total, each in zip(sums, blocks, strict=True))
    # The next text would not fit.
    nexts = [int(each.lengths[0]) for each in blocks[1:]]
    assert all(total + more > limit for total, more in zip(sums, nexts, strict=False))
    np.testing.assert_array_equal(Tokens.joined(blocks).text_id, built.corpus.document.text_id)
    assert (bank.get(built.corpus.bank_id).step == 7).all()


# The miner


class LocalPool:
    """A pool of one encoder in this process; its first ``num_lost`` requests find none."""

    def __init__(self, num_lost: int = 0) -> None:
        self.encoder, self.num_lost, self.steps = CorpusEncoder(CONFIG, vocabulary()), num_lost, list[int]()
        self.waited = list[float]()

    def begin(self) -> str:
        return "attempt"

    def publish(self, weights: Any, *, step: int, attempt: str) -> None:
        assert attempt == "attempt"
        self.encoder.load(weights)
        self.steps.append(step)

    def encode(self, texts: Tokens, *, waited_s: float = 0.0, **how: Any) -> SimpleNamespace:
        self.num_lost -= 1
        self.waited.append(waited_s)
        encoded = None
        if self.num_lost < 0:
            encoded = Encoded(self.encoder.encode(texts, **how), self.steps[-1], 1)
        return SimpleNamespace(encoded=encoded, waited_s=waited_s)


def newest_table(miner: Miner, group: str, version: str = "") -> MinedTable:
    """Wait for a table other than this version."""
    deadline = time.monotonic() + 60
    while (table := miner.update_for(group, version).table) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return table


def test_a_miner_mines_with_the_newest_weights_of_the_latest_group_and_waits_for_a_lost_pool(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    built, weights = (
        build_corpus(held_rows(), explicit=True),
        [numpy_weights(towers(seed)) for seed in (0, 1)],
    )
    expected = []
    for each in weights:
        in_bank = search_of(built, LocalBank(built.corpus.bank_id), each)
        in_bank.embed_documents()
        expected.append(in_bank.mine().document)
    assert not np.array_equal(*expected)
    pool, notices = LocalPool(num_lost=3), MagicMock()
    bank: Any = LocalBank(built.corpus.bank_id)
    local: Any = pool
    miner = Miner(CONFIG.negatives.mined, *built, bank, built.corpus.bank_id, local, notices)
    assert miner.update_for("first", "").table is None
    miner.publish("first", 40, weights[0])
    first = newest_table(miner, "first")
    np.testing.assert_array_equal(first.document, expected[0])
    assert (first.query_step, set(first.step[first.document >= 0])) == (40, {40})
    assert miner.update_for("first", first.version).table is None
    assert miner.update_for("second", "").table is None
    miner.publish("second", 20, weights[1])  # it resumes before the weights of the first one
    second = newest_table(miner, "second")
    np.testing.assert_array_equal(second.document, expected[1])
    assert (second.query_step, set(second.step[second.document >= 0])) == (20, {20})
    assert not notices.mock_calls
    with patch.object(bank, "nearest", side_effect=RunError("a shard is away")):
        miner.publish("second", 25, weights[0])
        while not notices.mock_calls:
            time.sleep(0.01)
    assert "a shard is away" in str(notices.mock_calls[0])
    miner.publish("second", 30, weights[0])
    np.testing.assert_array_equal(newest_table(miner, "second", second.version).document, expected[0])


def test_a_miner_without_encoders_asks_and_publishes_less_and_less_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    monkeypatch.setattr(miner_module, "_MAX_RETRY_S", 0.04)
    built = build_corpus(held_rows(), explicit=True)
    pool, bank = LocalPool(num_lost=8), LocalBank(built.corpus.bank_id)
    miner = Miner(CONFIG.negatives.mined, *built, bank, built.corpus.bank_id, pool, MagicMock())  # type: ignore[arg-type]
    miner.publish("first", 40, numpy_weights(towers()))
    newest_table(miner, "first")
    # The first requests are sent ahead, and find that the encoders start.
    waited = [each for each in pool.waited if each]
    assert waited[:5] == [0.01, 0.02, 0.04, 0.04, 0.04]
    assert len(pool.steps) == 1 + sum(each > 0.01 for each in waited)


def test_a_miner_that_waits_for_encoders_follows_a_new_group_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 1_000.0)
    built = build_corpus(held_rows(), explicit=True)
    pool, bank = LocalPool(num_lost=1), LocalBank(built.corpus.bank_id)
    miner = Miner(CONFIG.negatives.mined, *built, bank, built.corpus.bank_id, pool, MagicMock())  # type: ignore[arg-type]
    miner.publish("first", 40, numpy_weights(towers()))
    while pool.num_lost > 0:
        time.sleep(0.01)
    miner.publish("second", 20, numpy_weights(towers()))
    assert newest_table(miner, "second").query_step == 20


def test_a_miner_starts_without_lines_of_rays_core(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    give_a_noisy_core(monkeypatch, "raycl.training.mining")
    monkeypatch.setattr("raycl.training.mining.start_pool", lambda *_, **__: nullcontext("pool"))
    job: Any = SimpleNamespace(
        config=CONFIG, coordinator=None, vocabulary="some", network=None, corpus=None, stream=None
    )
    with start_miner(job, None, None, np.empty(0), actors=(1, 1)) as found:  # type: ignore[arg-type]
        os.write(2, b"later\n")
    assert found == ("actor", "pool")
    assert capfd.readouterr().err == "later\n"


# Draws


def negatives_of(corpus: Corpus, table: MinedTable | None, **settings: Any) -> MinedNegatives:
    given: dict[str, Any] = {"num": 3, "candidates": CANDIDATES} | settings
    mined = MinedNegatives(corpus, MinedConfig(**given), seed=5)
    mined.use(table)
    return mined


def any_table(corpus: Corpus, num_known: int = CANDIDATES) -> MinedTable:
    """Return a table of documents that match no query of the pair, with a step that tells them apart."""
    document = np.full((len(corpus.positive), CANDIDATES), -1, np.int32)
    for pair, (query, _) in enumerate(corpus.positive):
        others = np.setdiff1d(np.arange(len(corpus.document)), corpus.matches_of(query))
        document[pair, :num_known] = others[:num_known]
    return MinedTable(document=document, step=np.where(document < 0, -1, 100 + document), query_step=200)


def test_each_query_draws_distinct_candidates_of_its_pair_with_their_steps() -> None:
    rows = held_rows()
    corpus = build_corpus(rows, explicit=True).corpus
    mined = negatives_of(corpus, any_table(corpus))
    seen = []
    for epoch in range(20):
        batch = rows.take(np.arange(40), epoch=epoch)
        drawn = mined.draw(batch)
        documents = drawn.document.reshape(40, 3)
        candidates = any_table(corpus).document[corpus.pairs_of(batch.sample_id)]
        assert all(
            len(set(row)) == 3 and set(row) <= set(known)
            for row, known in zip(documents, candidates, strict=True)
        )
        assert np.array_equal(drawn.step, 100 + drawn.document)
        seen.append(documents)
    first = np.stack(seen)[:, 0].ravel()
    assert set(first) == set(any_table(corpus).document[corpus.pairs_of(rows.sample_id[:1])][0])
    assert mined.metrics(step=250) == {
        "mined_random_fraction": 0.0,
        "negatives_age_mean": pytest.approx(150 - seen[-1].mean()),
        "negatives_age_max": 150 - seen[-1].min(),
    }


def test_the_draws_of_a_row_do_not_depend_on_the_number_of_workers() -> None:
    rows = held_rows()
    corpus = build_corpus(rows, explicit=True).corpus
    mined = negatives_of(corpus, any_table(corpus, 4), random_fraction=0.4)
    whole = mined.draw(rows.take(np.arange(40), epoch=3))
    halves = [mined.draw(rows.take(np.arange(start, 40, 2), epoch=3)) for start in (0, 1)]
    for name in ("document", "step"):
        interleaved = np.stack([getattr(each, name).reshape(20, 3) for each in halves], 1)
        assert np.array_equal(interleaved.ravel(), getattr(whole, name))


@pytest.mark.parametrize(
    ("num_known", "fraction", "expected"), [(6, 0.0, 0.0), (1, 0.0, 2 / 3), (6, 0.5, 0.5), (None, 0.0, 1.0)]
)
def test_random_documents_match_no_query_and_fill_what_the_table_lacks(
    num_known: int | None, fraction: float, expected: float
) -> None:
    rows = held_rows()
    corpus = build_corpus(rows, explicit=True).corpus
    table = None if num_known is None else any_table(corpus, num_known)
    mined = negatives_of(corpus, table, random_fraction=fraction)
    found = set()
    fractions = []
    for epoch in range(60):
        batch = rows.take(np.arange(NUM_ROWS), epoch=epoch)
        drawn = mined.draw(batch)
        fractions.append(mined.metrics(step=0)["mined_random_fraction"])
        queries = np.repeat(corpus.positive[corpus.pairs_of(batch.sample_id), 0], 3)
        is_random = drawn.step < 0
        for query, document in zip(queries[is_random], drawn.document[is_random], strict=True):
            assert document not in corpus.matches_of(query)
        found |= set(drawn.document[is_random].tolist())
    assert np.mean(fractions) == pytest.approx(expected, abs=0.03)
    if expected:
        assert found == set(range(len(corpus.document)))


def test_a_query_that_all_documents_match_draws_its_own() -> None:
    rows = held_rows({"query": ["q", "q", "q", "r"], "document": ["a", "b", "c", "b"]})
    built = build_corpus(rows, explicit=True)
    assert built.matches.notices() == ["1 of 2 queries match all documents, and get no mined negatives"]
    own = built.corpus.positive[built.corpus.pairs_of(rows.sample_id), 1]
    for epoch in range(5):
        drawn = (
            negatives_of(built.corpus, None).draw(rows.take(np.arange(4), epoch=epoch)).document.reshape(4, 3)
        )
        assert np.array_equal(drawn[:3], np.repeat(own[:3, None], 3, axis=1))
        assert own[3] not in drawn[3]


def test_mined_documents_follow_the_explicit_negatives_with_their_texts_and_ids() -> None:
    rows = held_rows()
    corpus = build_corpus(rows, explicit=True).corpus
    mined = negatives_of(corpus, any_table(corpus))
    batch = rows.take(np.arange(20), epoch=1)
    plain, transform = PairTransform(), PairTransform(mined=mined)
    documents, explicit = mined.draw(batch).document, plain.ids_and_negatives(batch)[0].negative
    assert explicit is not None
    assert corpus.document_id is not None
    added = np.stack([corpus.document.text_id[documents], corpus.document_id[documents]], axis=1)
    names, tokens = transform.ids_and_negatives(batch)
    assert names.negative is not None
    assert torch.equal(names.negative, torch.cat([explicit, torch.from_numpy(added)]))
    assert tokens is not None
    for number, row in zip(documents, tokens[len(explicit) :], strict=True):
        length = corpus.document.lengths[number]
        assert row[:length].tolist() == corpus.document.take(np.array([number])).values.tolist()
        assert not row[length:].any()
    without, _ = PairTransform(explicit=False, mined=mined).ids_and_negatives(batch)
    assert torch.equal(without.negative, torch.from_numpy(added))  # type: ignore[arg-type]


def test_mined_and_explicit_negatives_are_drawn_apart() -> None:
    rows = held_rows(clicks(NUM_ROWS, num_negatives=[CANDIDATES]))
    corpus, batch, seed = build_corpus(rows, explicit=True).corpus, rows.take(np.arange(NUM_ROWS)), 5
    mined = negatives_of(corpus, any_table(corpus))
    candidates = any_table(corpus).document[corpus.pairs_of(batch.sample_id)]
    places = candidates[:, None] == mined.draw(batch).document.reshape(NUM_ROWS, 3, 1)
    explicit = PairTransform(explicit=3, seed=seed)._drawn(batch, np.full(NUM_ROWS, CANDIDATES))
    assert explicit is not None
    same = np.sort(places.argmax(axis=2)) == explicit.reshape(NUM_ROWS, 3) % CANDIDATES
    assert same.all(axis=1).mean() < 0.2  # 1 of 20 sets of three by chance


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"negatives.mined.cpus_per_actor": 8.0},
            "negatives.mined needs 8 CPUs for 1 actors, and the cluster has 4;",
        ),
        ({"negatives.mined.actors": 3}, "2 workers with 1 CPUs each and 3 for other tasks need 5 CPUs, the"),
        (
            {"negatives.mined.gpus_per_actor": 0.5},
            "negatives.mined needs 0.5 GPUs for 1 actors, and the workers",
        ),
        (
            {"negatives.mined.node_label": "zone=b"},
            "no node has the label zone=b of negatives.mined.node_label;",
        ),
    ],
)
def test_a_pool_that_does_not_fit_beside_the_workers_is_refused_in_one_line(
    settings: dict[str, Any], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    monkeypatch.setattr(
        "ray.nodes", lambda: [{"Alive": True, "Labels": {"zone": "a"}, "Resources": {"CPU": 4.0}}]
    )
    config = override(CONFIG, {"workers": 2, "cpus_per_worker": 1.0})
    check_cluster(config, streamed=False, report=lambda _: None)
    with pytest.raises(ConfigError, match=problem):
        check_cluster(override(config, settings), streamed=False, report=lambda _: None)


@pytest.mark.parametrize(
    ("streamed", "workers", "advice"),
    [
        (True, 2, "; lower negatives.mined.cpus_per_actor, set data.cache=materialize, or set autoscaling"),
        (
            False,
            64,
            "; lower --workers, set cpus_per_worker, lower negatives.mined.cpus_per_actor, or set auto",
        ),
    ],
)
def test_a_run_without_cpus_for_its_miner_is_refused_with_the_settings_that_help(
    streamed: bool, workers: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True, "Labels": {}, "Resources": {"CPU": 2.0}}])
    with pytest.raises(ConfigError, match=f"need .* CPUs, the cluster has 2{advice}"):
        check_cluster(override(CONFIG, {"workers": workers}), streamed=streamed, report=lambda _: None)
    helped = override(CONFIG, {"workers": 2, "negatives.mined.cpus_per_actor": 0.5})
    check_cluster(helped, streamed=streamed, report=lambda _: None)


@pytest.mark.parametrize(("autoscaling", "expected"), [(False, 120.0), (True, 900.0)])
def test_the_bank_of_documents_waits_for_a_shard_until_a_lost_node_is_replaced(
    autoscaling: bool, expected: float
) -> None:
    config = override(CONFIG, {"autoscaling": autoscaling})
    spec = bank_spec(config, output="run", name="run", num_samples=9)
    assert spec.timeout_s == expected


class LocalRay:
    """Ray's calls of a client, whose answers arrive only while ``is_fast``."""

    def __init__(self) -> None:
        self.is_fast = True

    def put(self, value: Any) -> Any:
        return value

    def wait(self, references: list[Any], **_: Any) -> tuple[list[Any], list[Any]]:
        return (references, []) if self.is_fast else ([], references)

    def get(self, answer: Any) -> Any:
        assert self.is_fast, "a step waits for the miner"
        if isinstance(answer, RayError):
            raise answer
        return answer


def test_a_step_never_waits_for_the_miner_and_survives_its_death(monkeypatch: pytest.MonkeyPatch) -> None:
    corpus, local = build_corpus(held_rows(), explicit=True).corpus, LocalRay()
    monkeypatch.setattr(mining, "ray", local)
    monkeypatch.setattr(mining, "_ASK_EVERY_S", -1.0)
    mined, miner, network = negatives_of(corpus, None), MagicMock(), towers()
    client = MinerClient(miner, mined, refresh=5, device=torch.device("cpu"))
    tables = [replace(any_table(corpus, known), version=f"{known}") for known in (5, 6)]
    miner.update_for.remote.return_value = MinerUpdate("first", tables[0])
    client.publish(0, network)
    group, step, weights = miner.publish.remote.call_args.args
    assert step == 0
    assert all(np.array_equal(weights[name], value) for name, value in network.state_dict().items())
    for step in range(1, 5):
        client.after_step(step, network)
    assert mined.table is None  # taken at multiples of refresh alone
    client.after_step(5, network)
    np.testing.assert_array_equal(mined.table.document, tables[0].document)  # type: ignore[union-attr]
    assert miner.publish.remote.call_args.args[:2] == (group, 5)
    assert miner.update_for.remote.call_args.args == (group, "5")
    local.is_fast = False
    for step in range(6, 11):
        client.after_step(step, network)
    assert miner.publish.remote.call_args.args[1] == 5  # those weights are still on their way
    local.is_fast = True
    miner.update_for.remote.return_value = ActorDiedError()
    for step in range(11, 16):
        client.after_step(step, network)
    np.testing.assert_array_equal(mined.table.document, tables[0].document)  # type: ignore[union-attr]
    miner.update_for.remote.return_value = MinerUpdate("second", tables[1])
    for step in range(16, 21):
        client.after_step(step, network)
    np.testing.assert_array_equal(mined.table.document, tables[1].document)  # type: ignore[union-attr]
    assert client.metrics(step=20)["miner_restarts"] == 1
    kept = negatives_of(corpus, None)
    kept.load_state_dict(mined.state_dict())
    np.testing.assert_array_equal(kept.table.step, tables[1].step)  # type: ignore[union-attr]
    kept.load_state_dict({})
    assert kept.table is None


def test_a_query_of_many_matches_does_not_lengthen_the_search_of_all_others() -> None:
    values = {
        "query": [f"q{n}" for n in range(200)] + ["many"] * 300,
        "document": [f"d{n}" for n in range(500)],
    }
    built, network = build_corpus(held_rows(values), explicit=True), towers()
    bank = LocalBank(built.corpus.bank_id)
    search_in_bank = search_of(built, bank, numpy_weights(network))
    search_in_bank.embed_documents()
    with patch.object(bank, "nearest", wraps=bank.nearest) as calls:
        table = search_in_bank.mine()
    asked = [(len(each.args[0]), each.args[1]) for each in calls.call_args_list]
    few = CANDIDATES + SPARE + 1
    assert asked == [(64, few), (64, few), (64, few), (9, few + 299)]
    of_many = table.document[200:]
    assert of_many.max() < 200


# The corpus


def test_a_document_is_in_the_bank_under_the_least_id_of_its_rows_and_else_under_that_of_its_text() -> None:
    values = {
        "query": ["one", "two", "three", "two"],
        "document": ["a b", "c", "a b", "two"],
        "negatives": [["d"], ["c"], [], []],
    }
    rows = held_rows(values)
    built = build_corpus(rows, explicit=True)
    corpus, (d,) = built.corpus, text_ids(["d"], "document")
    assert corpus.document.text_id.tolist() == text_ids(["a b", "c", "two", "d"], "document")
    assert corpus.bank_id.tolist() == [0, 1, 3, d]
    assert corpus.positive.tolist() == [[0, 0], [1, 1], [2, 0], [1, 2]]
    assert corpus.pairs_of(np.array([3, 0, 2])).tolist() == [3, 0, 2]
    assert [corpus.matches_of(query).tolist() for query in range(3)] == [[0], [1, 2], [0]]
    assert corpus.document_id is None
    assert np.array_equal(corpus.documents_of(corpus.bank_id), np.arange(4))
    assert corpus.documents_of(np.array([7, d])).tolist() == [-1, 3]
    assert len(build_corpus(rows, explicit=False).corpus.document) == 3


@pytest.mark.parametrize("shared", [("query_id",), ("document_id",), ("query_id", "document_id")])
def test_matches_take_memory_in_proportion_to_the_texts_that_share_an_id(shared: Sequence[str]) -> None:
    sizes = []
    for number in (100, 200):
        values = {role: [f"{role[0]}{n}" for n in range(number)] for role in ("query", "document")}
        ids = {
            role: [0] * number if role in shared else list(range(number))
            for role in ("query_id", "document_id")
        }
        corpus = build_corpus(held_rows(values | ids), explicit=True).corpus
        assert corpus.matches_of(5).tolist() == list(range(number))
        sizes.append(len(corpus.to_bytes()))
    assert sizes[1] < 2.1 * sizes[0]


def test_the_own_text_of_a_query_matches_it_whatever_the_prompts() -> None:
    prompts = {"text.query_prompt": "query: ", "text.document_prompt": "a longer passage: "}
    config = small_config(settings=prompts | {"text.max_length": 40, "text.max_document_length": 40})
    values = {"query": ["one two", "three"], "document": ["four", "one two"]}
    rows, tokenizer = rows_of(config, values), vocabulary().tokenizer
    lengths = (
        tokenizer.num_prompt_tokens(config.text.query_prompt),
        tokenizer.num_prompt_tokens(config.text.document_prompt),
    )
    corpus = build_corpus(rows, explicit=True, prompt_lengths=lengths).corpus
    assert [corpus.matches_of(query).tolist() for query in (0, 1)] == [[0, 1], [1]]


# The bank


def test_replaced_rows_have_unit_length_and_the_step_and_are_saved_with_the_next_snapshot() -> None:
    bank, rows = MemoryBank(np.arange(5), 3, seed=0, momentum=0.0), np.arange(1.0, 7.0).reshape(2, 3)
    bank.mark_saved()
    before = bank.get(np.arange(5)).rows
    bank.update(np.array([3]), rows[:1].astype(np.float32), 8)
    bank.replace(np.array([3, 1]), rows.astype(np.float32), 8)
    held = bank.get(np.arange(5))
    assert held.step.tolist() == [-1, 8, -1, 8, -1]
    np.testing.assert_allclose(
        held.rows[[3, 1]], rows / np.linalg.norm(rows, axis=1, keepdims=True), rtol=1e-6
    )
    np.testing.assert_array_equal(held.rows[[0, 2, 4]], before[[0, 2, 4]])
    assert bank.unsaved().tolist() == [1, 3]
    bank.replace(np.array([3]), rows[1:].astype(np.float32), 8)  # the rows of one step are no mean
    np.testing.assert_array_equal(bank.get(np.array([3])).rows, held.rows[[1]])
