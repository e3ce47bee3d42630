"""Runs on texts, click logs and captioned images: training, resuming, evaluation, mining and preparation."""

import itertools
import json
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import ray
import torch

import raycl
from raycl.chain import read_chain
from raycl.config import RunConfig
from raycl.data import click_logs
from raycl.data.click_logs import CONTRADICTED, REPEATED, WITHOUT_POSITIVE
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.ids import content_id
from raycl.embedding_snapshot import LATEST, read_probe_set, read_snapshot
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.embed import embed_values
from raycl.inference.encoder import load_checkpoint_encoder
from raycl.models.build import load_tokenizer
from raycl.preparation import gather_texts, group_pairs, make_tokenizer
from raycl.records import read_metrics
from raycl.report.writer import write_report
from raycl.storage import Place
from raycl.training.coordinator import rows_in, start_coordinator
from raycl.training.data_module import DataModule
from raycl.training.preflight import column_names
from tests.cluster.conftest import in_this_process
from tests.cluster.test_negatives import assert_equal_runs
from tests.images import write_digits
from tests.settings import override_active
from tests.table_files import write_rows, write_saved
from tests.texts import invented_texts
from tests.towers import without_encoder

pytestmark = pytest.mark.usefixtures("ray_cluster")

NUM_QUERIES, BATCH_SIZE = 300, 32
PAIRS = ColumnNames(image=None, query="query", document="document")

SMALL: dict[str, Any] = {
    "workers": 2,
    "cpus_per_worker": 0.5,
    "text.vocabulary_size": 400,
    "encoder.kwargs": {"dim": 16, "hidden_dim": 0},
    "projection_head.dim": 16,
    "stages.0.epochs": 2,
    "stages.0.batch_size": BATCH_SIZE,
    "checkpoints.every_steps": 5,
    "log_every_steps": 1,
}


def run_of(method: str, **settings: Any) -> RunConfig:
    """A small run on two workers with dropout in its encoder."""
    return override_active(raycl.recipe(method, image_size=16), SMALL, settings)


def clicks() -> list[dict[str, Any]]:
    """Queries, each with its document and up to three shown documents without a click."""
    texts, random = invented_texts(NUM_QUERIES, seed=1), Random(0)
    rows = []
    for number, text in enumerate(texts):
        words = text.split()
        query = {"query": f"{' '.join(words[:3])} {number}", "query_id": f"q{number}"}
        rows.append({**query, "document": text, "document_id": number, "label": 1})
        for other in random.sample(range(NUM_QUERIES), random.randint(0, 3)):
            if other != number:
                rows.append({**query, "document": texts[other], "document_id": other, "label": 0})
    return rows


@pytest.fixture(scope="module")
def click_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A click log with repeated, contradictory, invalid and unused rows."""
    rows = clicks()
    rows.append(dict(rows[0]))
    rows.append({**rows[0], "label": 0})
    rows.append(
        {"query": "nobody clicked", "query_id": "none", "document": "seen", "document_id": 0, "label": 0}
    )
    rows.append({**rows[0], "query_id": "invalid", "document": None})
    rows.append({**rows[0], "query_id": "graded", "label": 2})
    path = tmp_path_factory.mktemp("clicks") / "clicks.parquet"
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=128)
    return path


@pytest.fixture(scope="module")
def click_run(click_log: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, raycl.RunResult]:
    output = tmp_path_factory.mktemp("runs") / "clicks"
    # Two of 749 rows are invalid, which is permitted; two of 300 pairs would be too many.
    config = run_of("two_tower", **{"workers": 1, "data.max_invalid_fraction": 0.004})
    return output, raycl.train(config, data=str(click_log), output=str(output), quiet=True)


def test_a_click_log_is_grouped_and_skipped_rows_are_counted(
    click_run: tuple[Path, raycl.RunResult],
) -> None:
    output, result = click_run
    assert result.skipped == {WITHOUT_POSITIVE: 1, REPEATED: 1, CONTRADICTED: 1}
    assert result.invalid_rows == {"missing value": 1, "label other than 0 and 1": 1}
    assert json.loads((output / "data.json").read_text())["num_rows"] == NUM_QUERIES
    assert result.final["recall_at_10"] > 0.1  # chance level: 10 of 300 documents
    assert (output / "tokenizer.json").exists()


def test_the_snapshot_of_pairs_has_the_texts_and_both_towers(
    click_run: tuple[Path, raycl.RunResult], click_log: Path
) -> None:
    output, result = click_run
    place = Place(str(output))
    gallery, latest = read_probe_set(place), read_snapshot(place, LATEST)
    assert gallery is not None
    assert latest is not None
    assert latest.step == result.steps
    assert latest.key is not None
    assert latest.key.shape == latest.embedding.shape
    whole = {
        row["query"].replace(" ", ""): row["document"].replace(" ", "") for row in clicks() if row["label"]
    }
    for query, document in zip(gallery.contents["query"], gallery.contents["document"], strict=True):
        assert whole[query.replace(" ", "")].startswith(document.replace(" ", ""))  # truncated at its tokens
    assert gallery.contents["query"][0] in write_report(str(output)).read_text()


def test_a_dataset_of_clicks_keeps_its_ids_and_counts_each_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(click_logs.group_rows.__kwdefaults__, "num_parts", 4)
    # Two Ray batches with equal beginnings, each with one missing id beside large ids.
    num_queries, invalid = 512, [1_000, 2_000]
    ids = [None if row in invalid else 2**60 + row // 4 for row in range(4 * num_queries)]
    table = pa.table(
        {
            "query": ["a query of many people"] * len(ids),
            "query_id": ids,
            "document": [f"document {row}" for row in range(len(ids))],
            "label": [int(row % 4 == 1) for row in range(len(ids))],
        }
    )
    with start_coordinator() as coordinator:
        config = run_of("two_tower", **{"evaluation.every_epochs": 0})  # no row is held out
        samples = DataModule(config, coordinator, [ray.data.from_arrow(table)])
        samples.learn_vocabulary(None)
        [decoded] = samples.read_rows()
        rows = rows_in(coordinator)
    found = pa.concat_tables(decoded.columns(["query_id.id"]))
    assert len(found) == samples.num_rows == rows.num_train == num_queries
    assert (rows.num_rows, rows.invalid) == (len(ids), {"missing id": 2})
    assert samples.num_read_first() == len(ids)
    held = {name for names in found["query_id.id"].to_pylist() for name in names}
    assert held == {2**60 + number for number in range(num_queries)}


@pytest.mark.parametrize(("num_parts", "with_ids"), [(1, True), (3, True), (3, False)])
def test_queries_with_a_text_or_an_id_in_common_are_one(
    num_parts: int, monkeypatch: pytest.MonkeyPatch, *, with_ids: bool
) -> None:
    monkeypatch.setitem(click_logs.group_rows.__kwdefaults__, "num_parts", num_parts)
    random = Random(num_parts)
    log = [
        {
            "query": f"text {random.randrange(60)}",
            "query_id": f"search {random.randrange(60)}",
            "document": f"document {random.randrange(9)}",
            "label": random.randrange(2),
        }
        for _ in range(90)
    ]
    names = ["query", "query_id"] if with_ids else ["query"]
    columns = ColumnNames(image=None, query="query", document="document", label="label")
    columns = replace(columns, query_id="query_id") if with_ids else columns
    with start_coordinator() as coordinator:
        rows = ray.data.from_arrow(pa.Table.from_pylist(log)).repartition(4)
        found = click_logs.group_dataset(rows, columns, coordinator).take_all()

    def joined(query: str) -> list[dict[str, Any]]:
        """The rows of the log that a query reaches through texts and ids."""
        reached = {query}
        while True:
            own = [row for row in log if reached & {row[name] for name in names}]
            more = {row[name] for row in own for name in names}
            if more <= reached:
                return own
            reached |= more

    assert len({len(joined(row["query"])) for row in log}) > 2  # groups of several sizes
    pairs = set()
    for pair in found:
        own = joined(pair["query"])
        clicked = {row["document"] for row in own if row["label"]}
        assert pair["negatives"] == sorted({row["document"] for row in own} - clicked)
        pairs.add((min(row["query"] for row in own), pair["document"]))
    assert len(pairs) == len(found)  # repeated pairs count once
    assert pairs == {
        (min(each["query"] for each in joined(row["query"])), row["document"]) for row in log if row["label"]
    }


def test_a_click_log_has_the_same_order_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(click_logs.group_rows.__kwdefaults__, "num_parts", 12)
    texts = [f"text {number}" for number in range(60)]
    log = ray.data.from_arrow(pa.table({"query": texts, "document": texts, "label": [1] * 60}))
    with start_coordinator() as coordinator:
        config = run_of("two_tower", **{"data.cache": "stream", "evaluation.every_epochs": 0})
        orders = [DataModule(config, coordinator, [log]).data_sets[0].dataset.take_all() for _ in range(2)]
    assert len(orders[0]) == 60
    assert orders[0] == orders[1]


def test_a_run_on_pairs_learns_and_its_towers_load(click_run: tuple[Path, raycl.RunResult]) -> None:
    output, _ = click_run
    recalls = [line["recall_at_10"] for line in read_metrics(Place(str(output))) if "recall_at_10" in line]
    assert len(recalls) >= 2
    query, key = (raycl.load_encoder(str(output), side=side).encode(["a text"]) for side in ("query", "key"))
    assert torch.equal(query, key)  # one shared tower
    asked = load_checkpoint_encoder(str(output)).embed("text", "a text")
    assert np.allclose(asked, torch.nn.functional.normalize(query)[0].numpy(), atol=1e-6)


@pytest.mark.drill
@pytest.mark.parametrize(
    "store",
    [
        {"negatives.store": "queue", "negatives.capacity": 64},
        {"negatives.store": "partition", "stages.0.loss": "gcl", "negatives.explicit": False}
        | {"bank.max_staleness": 0, "bank.shards": 2},
    ],
)
def test_a_run_that_loses_a_worker_equals_an_uninterrupted_run(
    store: dict[str, Any], click_log: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {
        "encoder.name": "tests.cluster.networks:words",
        "encoder.kwargs": {"dim": 16, "die_at": 8, "marker": str(tmp_path / "died")},
        "evaluation.every_epochs": 0,
        "separate_towers": True,
        **store,
    }
    mortal = run_of("two_tower", **settings)
    raycl.train(mortal, data=str(click_log), output=str(tmp_path / "killed"), quiet=True)
    assert (tmp_path / "died").exists()
    # The marker exists, so no further crash happens.
    raycl.train(mortal, data=str(click_log), output=str(tmp_path / "whole"), quiet=True)
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.drill
@pytest.mark.parametrize("ending", ["csv", "delta", "iceberg", "lance"])
def test_a_run_that_loses_a_worker_equals_a_run_on_parquet(
    ending: str, click_log: Path, tmp_path: Path
) -> None:
    data = write_rows(tmp_path / f"clicks.{ending}", pq.read_table(click_log).to_pylist())
    settings: dict[str, Any] = {
        "encoder.name": "tests.cluster.networks:words",
        "encoder.kwargs": {"dim": 16, "die_at": 8, "marker": str(tmp_path / "died")},
        "evaluation.every_epochs": 0,
        "separate_towers": True,
    }
    mortal = run_of("two_tower", **settings)
    raycl.train(mortal, data=str(data), output=str(tmp_path / "killed"), quiet=True)
    assert (tmp_path / "died").exists()
    raycl.train(mortal, data=str(click_log), output=str(tmp_path / "whole"), quiet=True)
    assert_equal_runs(tmp_path / "killed", tmp_path / "whole")


@pytest.mark.drill
def test_runs_on_a_saved_data_set_and_on_tars_and_a_table_equal_a_run_on_parquet(tmp_path: Path) -> None:
    table = pq.read_table(write_digits(tmp_path / "digits.parquet", 200))
    captions = [f"the digit {label}" for label in table["label"].to_pylist()]
    table = pa.table({"image": table["image"], "caption": captions})
    folders = {name: tmp_path / name for name in ("parquet", "saved", "tars")}
    write_saved(folders["saved"], table)
    for number, part in enumerate((table.slice(0, 100), table.slice(100))):
        for name, ending in (("parquet", "parquet"), ("tars", "tar")):
            write_rows(folders[name] / f"{number}.{ending}", part.to_pylist())
    folders["lance"] = write_rows(tmp_path / "rows.lance", table.to_pylist())
    settings: dict[str, Any] = {
        "workers": 1,
        "data.channels": 1,
        "encoder.name": "tests.cluster.networks:small",
        "encoder.kwargs": {"channels": 1},
        "text_encoder.kwargs": {"dim": 16, "hidden_dim": 0},
        "evaluation.every_epochs": 0,
    }
    for name, data in folders.items():
        for cache in ("materialize", "stream"):
            config = run_of("clip", **settings, **{"data.cache": cache})
            raycl.train(config, data=str(data), output=str(tmp_path / f"{name}-{cache}"), quiet=True)
            assert_equal_runs(tmp_path / f"{name}-{cache}", tmp_path / f"parquet-{cache}")


def test_retrieval_is_evaluated_beside_a_lexical_baseline_and_shows_examples(
    click_run: tuple[Path, raycl.RunResult], tmp_path: Path
) -> None:
    path = tmp_path / "test.parquet"
    pq.write_table(pa.Table.from_pylist(clicks()[:200]), path)
    found = raycl.evaluate("retrieval", run=str(click_run[0]), test=str(path), examples=2, quiet=True)
    assert found["baseline"]["bm25"]["recall_at_10"] > 0.9  # queries consist of words of their document
    assert 0 < found["ndcg_at_10"] <= 1
    assert 0 < found["average_precision"] <= 1
    assert found["ndcg_at_10"] <= found["hybrid"]["ndcg_at_10"] <= 1
    assert len(found["examples"]) == 2
    assert found["num_test"] == 200


def test_a_train_set_adds_documents_and_its_matches_are_excluded(
    click_run: tuple[Path, raycl.RunResult], tmp_path: Path
) -> None:
    rows = [row for row in clicks() if row["label"]]
    test, train = tmp_path / "test.parquet", tmp_path / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows[:40]).drop(["label"]), test)
    # Equal queries with other matching documents, which must not displace the expected documents.
    others = [{**row, "document": f"{row['query']} {row['query']}"} for row in rows[:40]]
    pq.write_table(pa.Table.from_pylist([*others, *rows[40:]]).drop(["label"]), train)
    with in_this_process():
        known = raycl.evaluate(
            "retrieval", run=str(click_run[0]), test=str(test), train=str(train), quiet=True
        )
    assert known["baseline"]["bm25"]["recall_at_1"] > 0.9
    assert known["num_train"] == NUM_QUERIES
    assert "average_precision" not in known


def test_mined_negatives_exclude_matches(
    click_run: tuple[Path, raycl.RunResult],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    embed_here = in_this_process()(embed_values)  # then tasks of Ray search
    monkeypatch.setattr("raycl.inference.mining.embed_values", embed_here)
    rows = [row for row in clicks() if row["query_id"] not in ("invalid", "graded")]
    data, mined = tmp_path / "pairs.parquet", tmp_path / "mined.parquet"
    pq.write_table(pa.Table.from_pylist(rows), data)
    summary = raycl.mine(str(click_run[0]), str(data), str(mined), num_negatives=3, max_relative_score=1.0)
    assert f"searching {NUM_QUERIES}/{NUM_QUERIES}  queries" in capsys.readouterr().err
    table = pq.read_table(mined)
    assert summary.num_pairs == len(table) == NUM_QUERIES
    explicit = {row["query"]: [] for row in rows}
    for row in rows:
        if row["label"] == 0:
            explicit[row["query"]].append(row["document"])
    for row in table.to_pylist():
        assert row["document"] not in row["negatives"]
        assert set(explicit[row["query"]]) <= set(row["negatives"])
        assert len(set(row["negatives"])) == len(row["negatives"])
    assert summary.num_negatives > 0


@pytest.mark.drill
def test_a_grouped_log_is_streamed_with_a_prepared_tokenizer(click_log: Path, tmp_path: Path) -> None:
    grouped, place = tmp_path / "grouped", tmp_path / "tokenizer.json"
    num_pairs, rows = group_pairs(str(click_log), str(grouped), columns=PAIRS)
    assert num_pairs == NUM_QUERIES
    assert rows.skipped[WITHOUT_POSITIVE] == 1
    assert (rows.num_rows, rows.num_invalid) == (pq.read_metadata(click_log).num_rows, 2)
    made, stats = make_tokenizer(str(click_log), str(place), columns=PAIRS, vocabulary_size=400)
    assert stats.num_rows >= 2 * rows.num_rows
    texts = tmp_path / "texts.parquet"  # the same log without ids
    pq.write_table(pq.read_table(click_log, columns=["query", "document"]), texts)
    of_texts, _ = make_tokenizer(str(texts), f"{place}.json", columns=PAIRS, vocabulary_size=400)
    assert of_texts.fingerprint == made.fingerprint
    config = run_of("two_tower", **{"data.cache": "stream", "text.tokenizer": str(place)})
    result = raycl.train(config, data=str(grouped), output=str(tmp_path / "run"), quiet=True)
    assert result.steps > 0
    encoder = raycl.load_encoder(str(tmp_path / "run"))
    assert encoder.tokenizer.fingerprint == made.fingerprint  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize(
    "ids",
    [
        (),
        *(pytest.param(ids, marks=pytest.mark.drill) for ids in (("query_id",), ("document_id",))),
    ],
)
def test_a_prepared_log_keeps_its_ids(ids: tuple[str, ...], click_log: Path, tmp_path: Path) -> None:
    log, grouped = tmp_path / "log.parquet", tmp_path / "grouped"
    pq.write_table(pq.read_table(click_log, columns=["query", "document", "label", *ids]), log)
    group_pairs(str(log), str(grouped), columns=PAIRS)
    columns = pq.read_schema(next(grouped.glob("*.parquet"))).names
    expected = {"query", "document", "negatives", *ids}
    assert set(columns) == (expected | {"negative_ids"} if "document_id" in ids else expected)


def test_an_earlier_run_guides_a_new_one(click_run: tuple[Path, raycl.RunResult], tmp_path: Path) -> None:
    run, data, documents = str(click_run[0]), tmp_path / "clicks.parquet", tmp_path / "documents"
    pq.write_table(pa.Table.from_pylist(clicks()), data)  # which repeats documents
    columns = ColumnNames(text="document", document_id="document_id")
    with in_this_process():
        raycl.embed(run, str(data), str(documents), columns=columns, side="key", quiet=True)
    # Any other folder with these columns is a guide too.
    queries = {row["query_id"]: row["query"] for row in clicks()}
    vectors = raycl.load_encoder(run).encode(list(queries.values())).tolist()
    pq.write_table(
        pa.table({"query_id": list(queries), "representation": vectors}), tmp_path / "queries.parquet"
    )
    guide = {"query": str(tmp_path / "queries.parquet"), "document": str(documents), "margin": 0.1}
    settings = {f"negatives.guide.{name}": value for name, value in guide.items()}
    short = {"workers": 1, "evaluation.every_epochs": 0, "stages.0.epochs": 1}
    config = run_of("two_tower", **settings, **short)
    raycl.train(config, data=str(data), output=str(tmp_path / "guided"), quiet=True)
    found = [line["guide_masked_fraction"] for line in read_metrics(Place(str(tmp_path / "guided")))]
    assert len(found) == NUM_QUERIES // BATCH_SIZE
    assert all(0 < fraction < 1 for fraction in found)


def test_a_run_guides_sentences_by_their_own_embeddings(tmp_path: Path) -> None:
    texts, vectors = invented_texts(80), np.random.default_rng(0).normal(size=(80, 4)).tolist()
    pq.write_table(pa.table({"text": texts}), tmp_path / "texts.parquet")
    pq.write_table(pa.table({"sample_id": range(80), "representation": vectors}), tmp_path / "guide.parquet")
    guided = {"negatives.guide.query": str(tmp_path / "guide.parquet"), "negatives.guide.margin": 0.5}
    config = run_of("simcse", **guided, **{"encoder.name": "bag_of_subwords"})
    source = find_source(str(tmp_path / "texts.parquet"), column_names(config))
    with start_coordinator() as coordinator:
        samples = DataModule(config, coordinator, [source])
        samples.learn_vocabulary(None)
        guide = samples.guide(samples.read_rows())
    assert guide is not None and guide.query is guide.document
    ids = np.arange(80)[::-1].copy()
    expected = np.array(vectors)[ids]
    expected /= np.linalg.norm(expected, axis=1, keepdims=True)
    np.testing.assert_allclose(guide.query.of(ids).numpy(), expected, atol=1e-3)


@pytest.mark.drill  # test_prompts.py compares the parts without Ray
def test_a_run_with_prompts_equals_a_run_on_texts_with_the_prompts(tmp_path: Path) -> None:
    query, document = "ask: ", "a page - "
    rows = [{"query": " ".join(text.split()[:3]), "document": text} for text in invented_texts(120, seed=4)]
    for number, row in enumerate(rows):
        row["negatives"] = [rows[number - 1]["document"]] * (number % 2)  # pyright: ignore[reportArgumentType]
    with_prompts = [
        {
            "query": query + row["query"],
            "document": document + row["document"],
            "negatives": [document + each for each in row["negatives"]],
        }
        for row in rows
    ]
    prompts = {"text.query_prompt": query, "text.document_prompt": document}
    found: list[list[Any]] = []
    for name, values, settings in (("prompted", rows, prompts), ("written", with_prompts, {})):
        run, data, output = str(tmp_path / name), str(tmp_path / f"{name}.parquet"), tmp_path / f"{name}-out"
        pq.write_table(pa.Table.from_pylist(values), data)
        config = run_of("two_tower", **{"workers": 1, "separate_towers": True, **settings})
        raycl.train(config, data=data, output=run, quiet=True)
        encoders = [raycl.load_encoder(run, side=side) for side in ("query", "key")]
        weights = [value for encoder in encoders for value in encoder.state_dict().values()]
        raycl.embed(
            run=run,
            data=data,
            output=str(output),
            columns=ColumnNames(text="document"),
            side="key",
            quiet=True,
        )
        embedded = pq.read_table(output).sort_by("sample_id")["representation"].to_pylist()
        raycl.mine(run=run, data=data, output=f"{output}.parquet", num_negatives=2, quiet=True)
        mined = pq.read_table(f"{output}.parquet")["negatives"].to_pylist()
        mined = [[each.removeprefix(document) for each in row] for row in mined]
        scores = raycl.evaluate("retrieval", run=run, test=data, baseline=False, quiet=True)
        found.append([weights, embedded, mined, dict(scores)])
    assert all(map(torch.equal, found[0][0], found[1][0]))
    assert found[0][1:] == found[1][1:]
    with pytest.raises(
        ConfigError, match="text.document_prompt has .* tokens, and texts are truncated after 2"
    ):
        long = run_of("two_tower", **prompts, **{"text.max_length": 20, "text.max_document_length": 2})
        raycl.train(long, data=data, output=str(tmp_path / "long"), quiet=True)


def test_sentences_are_streamed_and_evaluated_by_human_scores(tmp_path: Path) -> None:
    texts = invented_texts(400, seed=2)
    data, pairs = tmp_path / "texts.parquet", tmp_path / "sts.parquet"
    pq.write_table(pa.table({"text": [*texts, "", None]}), data)
    score = [len(set(a.split()) & set(b.split())) for a, b in itertools.pairwise(texts)]
    pq.write_table(pa.table({"sentence1": texts[:-1], "sentence2": texts[1:], "score": score}), pairs)
    corpus = tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"text": ["zyzzyva"] * 400 + [None]}), corpus)
    settings = {"workers": 1, "encoder.name": "bag_of_subwords", "data.cache": "stream"}
    config = run_of("simcse", **settings, **{"text.corpus": str(corpus)})
    result = raycl.train(config, data=str(data), output=str(tmp_path / "run"), quiet=True)
    assert result.invalid_rows == {"empty text": 1, "missing value": 1}
    assert len(load_tokenizer(result.output).encode(["zyzzyva"], 9)[0]) == 1  # a word of the corpus alone
    counted = "1 of 401 texts of text.corpus are invalid and were skipped (1 missing value; "
    assert any(line.startswith(counted) for line in result.notices)
    assert read_chain(Place(result.output))[0]["corpus"] == 400 * content_id(b"zyzzyva") % 2**64
    with in_this_process():
        found = raycl.evaluate("sts", run=str(tmp_path / "run"), test=str(pairs), train=str(data), quiet=True)
    assert found["spearman"]["sts"] == found["mean"] > 0.05  # chance level: 0 +- 0.05
    assert found["baseline"]["tfidf"]["mean"] > 0.5


def test_images_and_captions_have_separate_towers_and_partition_functions(tmp_path: Path) -> None:
    digits = write_digits(tmp_path / "digits.parquet", 200)
    table = pq.read_table(digits)
    names = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
    captions = [[f"the digit {names[n]}", f"a {names[n]} by hand"] for n in table["label"].to_pylist()]
    data = tmp_path / "captioned.parquet"
    pq.write_table(pa.table({"image": table["image"], "captions": captions}), data)
    config = run_of(
        "clip",
        **{
            "workers": 1,
            "data.columns.caption": "captions",
            "data.channels": 1,
            "encoder.name": "tests.cluster.networks:small",
            "encoder.kwargs": {"channels": 1},
            "text_encoder.kwargs": {"dim": 16, "hidden_dim": 0},
            "stages.0.chunk_size": 8,
            "stages.0.loss": "gcl",
            "negatives.store": "partition",
        },
    )
    output = tmp_path / "run"
    result = raycl.train(config, data=str(data), output=str(output), quiet=True)
    assert 0 < result.final["recall_at_10"] <= 1
    # The second epoch reads the partition functions that the first has stored.
    lines = read_metrics(Place(str(output)))
    ages = [line["negatives_age_mean"] for line in lines if "negatives_age_mean" in line]
    assert len(ages) == result.steps // 2
    assert min(ages) > 0
    image, text = (raycl.load_encoder(str(output), side=side) for side in ("query", "key"))
    assert image.spec.representation_dim == text.spec.representation_dim == 16
    unfinished = without_encoder(output, tmp_path / "unfinished")
    restored = raycl.load_encoder(str(unfinished), side="key")
    assert torch.equal(restored.encode(["a text"]), text.encode(["a text"]))
    columns = ColumnNames(caption="captions")
    with in_this_process():
        found = raycl.evaluate("retrieval", run=str(unfinished), test=str(data), columns=columns, quiet=True)
    assert 0 < found["query_to_document_recall_at_10"] <= 1
    assert 0 < found["document_to_query_recall_at_10"] <= 1


def test_texts_of_one_group_become_one_row(tmp_path: Path) -> None:
    data, output = tmp_path / "captions.parquet", tmp_path / "groups.parquet"
    rows = {"text": ["a", "b", "a", "c", "", "d"], "photo": ["1", "1", "1", "2", "2", None]}
    pq.write_table(pa.table(rows), data)
    found = gather_texts(str(data), str(output), group="photo")
    assert pq.read_table(output)["text"].to_pylist() == [["a", "b"]]
    assert (found.num_rows, found.num_texts, found.num_alone, found.num_invalid) == (1, 2, 1, 1)


def test_invalid_pairs_are_refused_before_the_run_starts(click_log: Path, tmp_path: Path) -> None:
    def refused(kind: type[Exception], says: str, data: Path, **settings: Any) -> None:
        with pytest.raises(kind, match=says):
            raycl.train(
                run_of("two_tower", **settings), data=str(data), output=str(tmp_path / "run"), quiet=True
            )
        assert not (tmp_path / "run" / "config.yaml").exists()

    empty = tmp_path / "empty.parquet"
    rows = [{"query": f"q{n}", "document": "d", "label": 0} for n in range(100)]
    pq.write_table(pa.Table.from_pylist(rows), empty)
    refused(DataError, "no query has a document with label 1", empty)
    invalid = tmp_path / "invalid.parquet"
    pq.write_table(pa.Table.from_pylist([{**row, "label": 2} for row in rows]), invalid)
    refused(DataError, r"100 of 100 rows are invalid \(100 label other than 0 and 1", invalid)
    refused(DataError, "no column 'clicked'", click_log, **{"data.columns.query": "clicked"})
    refused(StorageError, "no tokenizer at", click_log, **{"text.tokenizer": str(tmp_path / "none.json")})
    refused(ConfigError, "projection_head.dim", click_log, **{"projection_head.dim": 20})
    damaged = tmp_path / "damaged.json"
    damaged.write_text("{}")
    refused(ConfigError, "tokenizer is damaged", click_log, **{"text.tokenizer": str(damaged)})
