"""Negatives mined from a stream: its growing corpus, the miner that gets rows, and the workers that send them."""

import time
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import cloudpickle
import numpy as np
import pyarrow as pa
import pytest
import torch
from ray.exceptions import RayError

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.data.in_memory import Batch, InMemoryDataset, texts_of
from raycl.data.sampler import BatchShard
from raycl.data.streaming import StreamingSampler
from raycl.data.texts import Tokens
from raycl.data.windows import Piece
from raycl.models.build import build_towers
from raycl.storage import Place
from raycl.training import miner as miner_module
from raycl.training import mining
from raycl.training.banks import open_miner
from raycl.training.corpus import Corpus, GrowingCorpus, table_of_bytes
from raycl.training.encoder_pool import Encoded
from raycl.training.job import Job
from raycl.training.mined import MinedNegatives, MinedTable
from raycl.training.miner import CorpusEncoder, CorpusUpdate, Miner, MinerUpdate
from raycl.training.mining import MinerClient
from raycl.training.preflight import column_names
from raycl.training.transforms import Transform, build_transform
from tests.pairs import clicks, rows_of, small_config, vocabulary
from tests.test_encoder_pool import give_a_noisy_core
from tests.test_mined import LocalBank, LocalRay, newest_table, numpy_weights
from tests.test_mined_lists import lists, meanings, text_ids

pytestmark = pytest.mark.usefixtures("one_thread", "process_settings")

NUM_ROWS, CANDIDATES, NUM = 40, 6, 2
VALUES = {
    "two_tower": clicks(NUM_ROWS, num_negatives=[0, 2, 1]),
    "simcse": {"text": lists(NUM_ROWS)},
}


def config_of(name: str) -> RunConfig:
    mined = {"num": NUM, "candidates": CANDIDATES, "max_relative_score": 1.0}
    return small_config(name, {f"negatives.mined.{key}": value for key, value in mined.items()})


def rows_of_stream(name: str) -> InMemoryDataset:
    return rows_of(config_of(name), VALUES[name])


def job_of(name: str, stream: StreamingSampler | None = None) -> Job:
    """Return the job of a worker, as the driver pickles it."""
    config = config_of(name)
    columns = column_names(config).found_in(list(VALUES[name]), where="the test")
    nothing: dict[str, Any] = dict.fromkeys(("output", "holdout", "coordinator"))
    sizes: dict[str, Any] = {"blocks": (), "num_train": (NUM_ROWS,), "is_evaluated": False}
    job = Job(config=config, columns=columns, vocabulary=vocabulary(), stream=stream, **sizes, **nothing)
    return cloudpickle.loads(cloudpickle.dumps(job))


def corpus_of_job(name: str) -> GrowingCorpus:
    """Return the empty corpus that the driver gives to a miner."""
    return cloudpickle.loads(cloudpickle.dumps(GrowingCorpus(*job_of(name).stream_corpus())))


def some(rows: InMemoryDataset, numbers: Any) -> pa.Table:
    """Return these rows as a worker sends them."""
    return pa.Table.from_batches([rows.arrow_rows(np.array(numbers))])


class Pool:
    """A pool of one encoder in this process."""

    def __init__(self, config: RunConfig) -> None:
        self.encoder, self.step = CorpusEncoder(config, vocabulary()), 0

    def begin(self) -> str:
        return "attempt"

    def publish(self, weights: Any, *, step: int, attempt: str) -> None:
        self.encoder.load(weights)
        self.step = step

    def encode(self, rows: Any, *, waited_s: float = 0.0, **how: Any) -> SimpleNamespace:
        return SimpleNamespace(
            encoded=Encoded(self.encoder.encode(rows, **how), self.step, 1), waited_s=waited_s
        )


def miner_of(name: str, bank: Any = None) -> Miner:
    config = config_of(name)
    pool: Any = Pool(config)
    ids = np.arange(NUM_ROWS)
    bank = bank or LocalBank(ids, config.projection_head.dim)
    return Miner(config.negatives.mined, None, None, bank, ids, pool, MagicMock(), corpus_of_job(name))


def trained(name: str) -> Any:
    return build_towers(config_of(name), vocabulary()).eval()


def corpus_of(corpus_update: CorpusUpdate | None) -> Corpus:
    assert corpus_update is not None
    return Corpus.from_bytes(corpus_update.corpus)


def by_text(corpus: Corpus, table: MinedTable, number: int, place: int = 0) -> list[int]:
    """Return the text ids of the hard negatives of a row."""
    (pair,) = corpus.pairs_of(np.array([number]), np.array([place]))
    documents = table.document[pair]
    return corpus.document.text_id[documents[documents >= 0]].tolist()


@torch.no_grad()
def plain_pairs(network: Any, numbers: list[int]) -> dict[int, list[int]]:
    """Return the text ids of the hard negatives of these rows, the only ones, by a sort in float64."""
    rows = rows_of_stream("two_tower").take(np.array(numbers))
    query, document = rows.contents["query"], rows.contents["document"]
    assert isinstance(query, Tokens)
    assert isinstance(document, Tokens)
    network = network.double()
    similarity = (
        network.query(torch.from_numpy(query.padded()))
        @ network.key_tower(torch.from_numpy(document.padded())).T
    )
    values = VALUES["two_tower"]
    same = {
        side: connected([(values[side][each], values[f"{side}_id"][each]) for each in numbers])
        for side in ("query", "document")
    }
    found = {}
    for place, number in enumerate(numbers):
        mine = {
            same["document"][each]
            for each in range(len(numbers))
            if same["query"][each] == same["query"][place]
        }
        seen, near = set[int](), list[int]()
        for other in similarity[place].argsort(descending=True, stable=True).tolist():
            group = same["document"][other]
            if group in mine or group in seen or similarity[place, other] > similarity[place, place]:
                continue
            seen.add(group)
            near.append(int(document.text_id[other]))
        found[number] = near[:CANDIDATES]
    return found


def connected(names: list[tuple[str, str]]) -> list[int]:
    """Number rows so that rows that share a text or an id have the same number."""
    group = list(range(len(names)))
    for row, (text, name) in enumerate(names):
        shared = {group[other] for other in range(row) if text == names[other][0] or name == names[other][1]}
        group = [min(shared | {row}) if each in shared | {row} else each for each in group]
    return group


def mined_by(
    miner: Miner, name: str, network: Any, tables: list[pa.Table], step: int, version: str = ""
) -> MinerUpdate:
    """Let a miner have these rows and weights, and return its next update."""
    for table in tables:
        miner.add(table)
    miner.publish("group", step, numpy_weights(network))
    newest_table(miner, "group", version)
    return miner.update_for("group", version)


def test_a_stream_of_pairs_is_searched_as_far_as_it_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    rows, network = rows_of_stream("two_tower"), trained("two_tower")
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    miner = miner_of("two_tower")
    first = mined_by(miner, "two_tower", network, [some(rows, order[:20])], 10)
    corpus = corpus_of(first.corpus_update)
    expected = plain_pairs(trained("two_tower"), order[:20].tolist())
    assert {number: by_text(corpus, first.table, number) for number in expected} == expected  # type: ignore[arg-type]
    assert first.num_rows == 20
    unseen = np.sort(order[20:])
    assert (corpus.pairs_of(unseen) == -1).all()
    # Rows that come again, within a message or in a later one, are known.
    again = [some(rows, [*order[10:30], *order[15:40]]), some(rows, order)]
    second = mined_by(miner, "two_tower", network.float(), again, 20, first.table.version)  # type: ignore[union-attr]
    corpus = corpus_of(second.corpus_update)
    expected = plain_pairs(trained("two_tower"), order.tolist())
    assert {number: by_text(corpus, second.table, number) for number in expected} == expected  # type: ignore[arg-type]
    assert second.num_rows == NUM_ROWS
    assert second.table is not None
    # With the corpus of its last table, a client gets the next table alone.
    third = mined_by(miner, "two_tower", network, [], 30, second.table.version)
    unchanged = miner.update_for("group", second.table.version, corpus.key)
    assert third.corpus_update is not None
    assert unchanged.corpus_update is None
    np.testing.assert_array_equal(unchanged.table.document, second.table.document)  # type: ignore[union-attr]


def test_the_first_sentence_of_each_row_of_a_stream_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    rows, texts = rows_of_stream("simcse"), VALUES["simcse"]["text"]
    order = np.random.default_rng(0).permutation(NUM_ROWS)
    update = mined_by(miner_of("simcse"), "simcse", trained("simcse"), [some(rows, order)], 10)
    corpus, names = corpus_of(update.corpus_update), text_ids("simcse", texts)
    assert update.table is not None
    assert {names[each] for each in corpus.document.text_id.tolist()} == {row[0] for row in texts}
    expected = plain_first_sentences(texts, trained("simcse"))
    for number, row in enumerate(texts):
        for place, text in enumerate(row):
            got = [names[each] for each in by_text(corpus, update.table, number, place)]
            assert got == expected[text, row[0]], (number, place)


@torch.no_grad()
def plain_first_sentences(rows: list[list[str]], network: Any) -> dict[tuple[str, str], list[str]]:
    """Return the hard negatives of each sentence with the first one of its row, by a sort in float64."""
    network, same = network.double(), meanings(rows)
    texts = list(same)
    data = rows_of(config_of("simcse"), {"text": [[text] for text in texts]})
    tokens = [texts_of(batch, "text").tokens for batch in data.batches(1)]
    row_of = {
        text: network(torch.from_numpy(each.padded()))[0] for text, each in zip(texts, tokens, strict=True)
    }
    firsts, found = list(dict.fromkeys(row[0] for row in rows)), {}
    for row in rows:
        for text in row:
            cosine = {each: float(row_of[text] @ row_of[each]) for each in firsts if each not in same[text]}
            near = sorted(cosine, key=lambda each: -cosine[each])
            near = [each for each in near if cosine[each] <= float(row_of[text] @ row_of[row[0]]) + 1e-6]
            near = [each for at, each in enumerate(near) if not same[each] & set(near[:at])]
            found[text, row[0]] = near[:CANDIDATES]
    return found


def test_a_miner_waits_for_more_rows_than_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    rows, miner, network = rows_of_stream("simcse"), miner_of("simcse"), trained("simcse")
    for step, table in enumerate([None, some(rows, range(1, CANDIDATES + 1))]):
        if table is not None:
            miner.add(table)
        miner.publish("group", step, numpy_weights(network))
        while miner._in_use is not miner._published:
            time.sleep(0.01)
    time.sleep(0.2)
    assert miner.update_for("group", "").table is None
    assert not miner._coordinator.mock_calls
    assert mined_by(miner, "simcse", network, [some(rows, range(10, 20))], 7).table is not None


def test_rows_in_the_bank_that_a_miner_does_not_know_are_no_negatives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    rows, network, bank = rows_of_stream("two_tower"), trained("two_tower"), LocalBank(np.arange(NUM_ROWS))
    mined_by(miner_of("two_tower", bank), "two_tower", network, [some(rows, range(NUM_ROWS))], 10)
    update = mined_by(miner_of("two_tower", bank), "two_tower", network, [some(rows, range(15))], 20)
    corpus = corpus_of(update.corpus_update)
    expected = plain_pairs(trained("two_tower"), list(range(15)))
    assert {number: by_text(corpus, update.table, number) for number in expected} == expected  # type: ignore[arg-type]


# The workers


def mined_of(name: str) -> MinedNegatives:
    mined = job_of(name).mined_negatives()
    assert mined is not None
    return mined


def stream_of(rows: InMemoryDataset, mined: MinedNegatives) -> StreamingSampler:
    """Return a stream of these rows in order."""
    plain = StreamingSampler(open_epoch=iter, formats=rows._formats, seed=0, shuffle_buffer_size=1)  # type: ignore[arg-type]
    sampler = job_of("two_tower", plain).open_stream(mined)
    assert sampler is not None
    tables = [some(rows, range(start, start + 10)) for start in range(0, NUM_ROWS, 10)]
    reader: Any = MagicMock()
    reader.pieces.side_effect = lambda *_, **__: (Piece(table, 0) for table in tables)
    object.__setattr__(sampler, "_reader", reader)
    return sampler


def same_negatives(transform: Transform, other: Transform, batch: Batch) -> bool:
    """Whether two transforms give a batch the same negatives, by names and by tokens."""
    found = [each.ids_and_negatives(batch) for each in (transform, other)]
    pairs = list(zip(*((ids.negative, tokens) for ids, tokens in found), strict=True))
    return all(a is b is None or (a is not None and b is not None and torch.equal(a, b)) for a, b in pairs)


def test_rows_that_a_dead_miner_did_not_get_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mining, "ray", LocalRay())
    rows, network, mined = rows_of_stream("two_tower"), trained("two_tower"), mined_of("two_tower")
    batches = list(stream_of(rows, mined).epoch_batches(BatchShard(batch_size=10), epoch=0))
    remote, sent = MagicMock(), list[list[int]]()

    def add(table: pa.Table) -> Any:
        sent.append(table["sample_id"].to_pylist())
        return RayError("dead") if len(sent) == 1 else "added"

    remote.add.remote.side_effect = add
    remote.update_for.remote.return_value = RayError("dead")
    client = MinerClient(remote, mined, refresh=100, device=torch.device("cpu"))
    for step in range(1, 5):
        client.after_step(step, network)
    assert sent == 2 * [[each for batch in batches for each in batch.sample_id.tolist()]]


@pytest.mark.parametrize("name", VALUES)
def test_a_worker_sends_what_it_reads_takes_corpus_and_table_and_saves_both(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(miner_module, "_RETRY_S", 0.01)
    local = LocalRay()
    monkeypatch.setattr(mining, "ray", local)
    monkeypatch.setattr(mining, "_ASK_EVERY_S", -1.0)
    monkeypatch.setattr(mining, "_SHARED_BYTES", 256)
    rows, network, mined = rows_of_stream(name), trained(name), mined_of(name)
    batches = list(stream_of(rows, mined).epoch_batches(BatchShard(batch_size=10), epoch=0))
    transform = build_transform(config_of(name), vocabulary().tokenizer, None, mined)
    plain = build_transform(config_of(name), vocabulary().tokenizer)
    for batch in batches:
        assert same_negatives(transform, plain, batch)  # nothing is mined before the first table
    assert mined.metrics(step=3) == {"mined_random_fraction": 1.0}
    miner, remote = miner_of(name), MagicMock()
    remote.add.remote.side_effect = miner.add
    remote.publish.remote.side_effect = miner.publish
    remote.update_for.remote.side_effect = miner.update_for
    client = MinerClient(remote, mined, refresh=5, device=torch.device("cpu"))
    client.begin(0, network)
    client.after_step(1, network)
    (sent,) = remote.add.remote.call_args.args
    assert sent["sample_id"].to_pylist() == [each for batch in batches for each in batch.sample_id.tolist()]
    client.publish(5, network)
    newest_table(miner, client._group)
    client.after_step(6, network)
    client.after_step(10, network)
    assert mined.corpus is not None
    assert mined.table is not None
    num_messages = remote.add.remote.call_count
    batch = next(stream_of(rows, mined).epoch_batches(BatchShard(batch_size=10), epoch=1))
    client.after_step(11, network)
    assert remote.add.remote.call_count == num_messages  # all rows are known
    assert not same_negatives(transform, plain, batch)
    assert mined.metrics(step=11)["mined_random_fraction"] < 1

    kept = mined_of(name)
    kept.load_state_dict(mined.state_dict())
    assert kept.corpus is not None
    assert kept.corpus.key == mined.corpus.key
    restored = build_transform(config_of(name), vocabulary().tokenizer, None, kept)
    assert same_negatives(restored, transform, batch)
    kept.load_state_dict({})
    assert kept.corpus is kept.table is None


def test_a_new_miner_gets_the_known_rows_and_its_smaller_corpus_is_not_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mining, "ray", LocalRay())
    monkeypatch.setattr(mining, "_ASK_EVERY_S", -1.0)
    rows, remote = rows_of_stream("two_tower"), MagicMock()
    parts = [corpus_of_job("two_tower") for _ in range(2)]
    parts[0].add(some(rows, range(30)))
    parts[1].add(some(rows, range(20)))
    built = [part.built() for part in parts]
    corpus_updates = [
        CorpusUpdate(part.to_bytes(), each.corpus.to_bytes())
        for part, each in zip(parts, built, strict=True)
        if each
    ]
    mined, network = mined_of("two_tower"), trained("two_tower")
    client = MinerClient(remote, mined, refresh=1, device=torch.device("cpu"))

    def table(number: int, step: int) -> MinedTable:
        each = built[number]
        assert each is not None
        shape = len(each.corpus.positive), CANDIDATES
        return MinedTable(
            document=np.zeros(shape, np.int32),
            step=np.full(shape, step, np.int32),
            query_step=step,
            version=f"{step}",
        )

    for step, (incarnation, number, corpus_update, num_rows) in enumerate(
        [
            ("first", 0, corpus_updates[0], 30),
            ("second", 1, corpus_updates[1], 20),
            ("second", 0, corpus_updates[0], 30),
            ("second", 0, None, 30),
        ]
    ):
        remote.update_for.remote.return_value = MinerUpdate(
            incarnation, table(number, step), corpus_update, num_rows
        )
        client.after_step(2 * step, network)
        client.after_step(2 * step + 1, network)
        assert mined.corpus is not None
        assert mined.table is not None
        assert len(mined.corpus.sample_id) == 30
        assert mined.table.query_step == (0 if step == 1 else step)
    # Once for the new miner, and for each of its two answers that lack rows.
    sent = [call.args[0] for call in remote.add.remote.call_args_list]
    assert len(sent) == 3
    for each in sent:
        assert each.equals(table_of_bytes(corpus_updates[0].rows))
        assert each["sample_id"].to_pylist() == list(range(30))
    assert client.metrics(step=9)["miner_restarts"] == 1


@pytest.mark.parametrize(("streamed", "expected"), [(False, (1, 2)), (True, (1, 1))])
def test_the_pool_of_a_miner_leaves_the_cpus_of_workers_and_data_tasks(
    streamed: bool, expected: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An encoder that waits for CPUs would take those of the tasks that read a stream, whose rows the workers await."""
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 4.0})
    give_a_noisy_core(monkeypatch, "raycl.training.mining")
    monkeypatch.setattr("raycl.training.banks.ray", MagicMock())
    monkeypatch.setattr("raycl.training.banks.start_bank", MagicMock())
    monkeypatch.setattr("raycl.training.banks.read_corpus", lambda _: (None, None, np.arange(NUM_ROWS)))
    start_pool = MagicMock(return_value=nullcontext())
    monkeypatch.setattr("raycl.training.mining.start_pool", start_pool)
    pool = {"negatives.mined.actors": 4, "negatives.mined.min_actors": 1}
    config = override(config_of("two_tower"), {"workers": 2, "cpus_per_worker": 1.0} | pool)
    stream: Any = MagicMock() if streamed else None
    job = replace(
        job_of("two_tower"),
        config=config,
        output=Place("run"),
        stream=stream,
        sample_id=np.arange(NUM_ROWS),
    )
    with open_miner(job, report=lambda _: None):
        assert start_pool.call_args.kwargs["actors"] == expected


def test_rows_of_a_stream_that_no_table_has_get_random_documents() -> None:
    rows, mined = rows_of_stream("simcse"), mined_of("simcse")
    part = corpus_of_job("simcse")
    part.add(some(rows, range(0, NUM_ROWS, 2)))
    built = part.built()
    assert built is not None
    corpus = built.corpus
    document = np.full((len(corpus.positive), CANDIDATES), -1, np.int32)
    for pair, (query, _) in enumerate(corpus.positive):
        document[pair] = np.setdiff1d(np.arange(len(corpus.document)), corpus.matches_of(query))[:CANDIDATES]
    mined.use(MinedTable(document=document, step=np.ones_like(document), query_step=1), corpus)
    batch = rows.take(np.arange(NUM_ROWS))
    drawn = mined.draw(batch)
    is_random = (drawn.step < 0).reshape(NUM_ROWS, NUM)
    assert not is_random[::2].any()
    assert is_random[1::2].all()
    assert mined.metrics(step=1)["mined_random_fraction"] == 0.5
    assert len(np.unique(drawn.document.reshape(NUM_ROWS, NUM)[1::2])) > 5
