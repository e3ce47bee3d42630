"""Retrieval tasks: searched documents, relevance, and excluded pairs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError, DataError
from raycl.evaluation import retrieval
from raycl.evaluation.lexical_baselines import bm25_search, tfidf_search
from raycl.evaluation.metrics import retrieval_scores
from raycl.evaluation.retrieval import (
    Task,
    benchmark_task,
    evaluate_retrieval,
    image_task,
    pair_task,
    read_captioned_images,
)
from raycl.evaluation.search import search
from raycl.models.encoder_io import save_encoder
from raycl.storage import Place
from tests.encoders import image_encoder
from tests.images import digit_files
from tests.pairs import small_config
from tests.test_saved_text import save

Write = Callable[..., str]
NAMES = ColumnNames()
BY_DOCUMENT = ColumnNames(document_id="document_id")


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write columns to a Parquet file of this name; return its path."""

    def to_parquet(name: str, **columns: Any) -> str:
        pq.write_table(pa.table(columns), tmp_path / name)
        return str(tmp_path / name)

    return to_parquet


def relevance_of(task: Task) -> set[tuple[Any, Any, int]]:
    return {(task.queries[q], task.documents[d], grade) for q, d, grade in task.relevance.tolist()}


def excluded(task: Task) -> set[tuple[Any, Any]]:
    return {(task.queries[q], task.documents[d]) for q, d in task.excluded.tolist()}


def test_queries_search_the_documents_and_negatives_of_both_sets(write: Write) -> None:
    test = write("test", query=["q", "r", "q"], document=["a", "b", "a"], negatives=[["c", "b"], None, ["d"]])
    train = write("train", query=["s", "t"], document=["e", "a"], negatives=[[], ["f"]])
    task = pair_task(test, train, NAMES)
    assert task.queries == ["q", "r"]
    assert task.documents == ["a", "b", "c", "d", "e", "f"]
    assert relevance_of(task) == {("q", "a", 1), ("r", "b", 1)}
    assert task.sizes == {"num_train": 2, "num_test": 3, "num_invalid": 0}


def test_lists_of_negatives_add_nothing_but_documents(write: Write) -> None:
    pairs = {"query": ["q", "r", "s"], "document": ["a", "q", "c"]}
    plain = pair_task(write("plain", **pairs), None, NAMES)
    grown = pair_task(write("grown", hard=[["x"], ["a", "y"], ["q"]], **pairs), None, NAMES)
    assert grown.documents == plain.documents  # a column with another name
    grown = pair_task(
        write("grown", hard=[["x"], ["a", "y"], ["q"]], **pairs), None, ColumnNames(negatives="hard")
    )
    assert grown.documents == [*plain.documents, "x", "y"]
    assert (relevance_of(grown), excluded(grown)) == (relevance_of(plain), excluded(plain))


def test_a_querys_own_text_and_its_matches_in_train_are_excluded_unless_relevant(write: Write) -> None:
    test = write("test", query=["q", "q", "r", "s"], document=["a", "b", "q", "s"], label=[1, 0, 2, 1])
    train = write("train", query=["q", "q", "q", "nobody"], document=["a", "c", "d", "a"], label=[1, 1, 0, 1])
    task = pair_task(test, train, NAMES)
    assert relevance_of(task) == {("q", "a", 1), ("q", "b", 0), ("r", "q", 2), ("s", "s", 1)}
    # "q" is also a document, and "s" matches itself. "d" does not match "q", so it stays a candidate.
    assert excluded(task) == {("q", "q"), ("q", "c")}


def test_positive_and_negative_labels_make_pairs_to_rank(write: Write) -> None:
    pairs = {"query": ["q", "q", "r"], "document": ["a", "b", "b"]}
    for label in ([3, 0, 1], [2, 0, 2], [1, 0, 1]):
        labeled = pair_task(write("test", **pairs, label=label), None, NAMES).labeled
        assert labeled is not None
        assert labeled.tolist() == [[0, 0, 1], [0, 1, 0], [1, 1, 1]]
    for label in ([1, 1, 1], [2, 1, 3], [0, 0, 0]):
        assert pair_task(write("test", **pairs, label=label), None, NAMES).labeled is None
    assert pair_task(write("unlabeled", **pairs), None, NAMES).labeled is None


def test_invalid_rows_of_both_sets_are_skipped_and_counted(write: Write) -> None:
    test = write("test", query=["q", " ", "r"], document=["a", "b", None], label=[1, 1, 1])
    invalid = {"negatives": [["c"], ["d", ""], None]}
    train = write("train", query=["s", "t", "u"], document=["e", "f", "g"], **invalid)
    task = pair_task(test, train, NAMES)
    assert (task.queries, task.documents) == (["q"], ["a", "e", "g", "c"])
    assert task.sizes == {"num_train": 2, "num_test": 1, "num_invalid": 3}


def test_texts_with_an_id_in_common_are_one_query_or_document(write: Write) -> None:
    test = write(
        "test",
        query=["q", "another q", "r", "r"],
        query_id=[1, 1, 2, 2],
        document=["a", "b", "c", "e"],
        document_id=["x", "y", "z", "w"],
        label=[1, 2, 1, 0],
    )
    train = write(
        "train",
        query=["third q", "r", "s"],
        query_id=[1, 2, 3],
        document=["c", "another a", "b"],
        document_id=["z", "x", "y"],
        negatives=[["another b", "c"], ["r"], []],
        negative_ids=[["y", "new"], ["u"], []],  # "c" has two ids
    )
    assert pair_task(test, train, NAMES).same_as.tolist() == list(range(7))  # pyright: ignore[reportOptionalMemberAccess]
    task = pair_task(test, train, replace(NAMES, query_id="query_id", document_id="document_id"))
    assert task.queries == ["q", "another q", "r"]
    assert task.documents == ["a", "b", "c", "e", "another a", "another b", "r"]
    assert task.same_as is not None
    assert task.same_as.tolist() == [0, 1, 2, 3, 0, 1, 6]
    both = {("a", 1), ("b", 2)}
    assert relevance_of(task) == {
        *((q, d, grade) for q in ("q", "another q") for d, grade in both),
        ("r", "c", 1),
        ("r", "e", 0),
    }
    # By the id of its query a match in train is excluded, with all texts of its document.
    assert excluded(task) == {("q", "c"), ("another q", "c"), ("r", "a"), ("r", "another a"), ("r", "r")}
    assert task.labeled is not None
    assert task.labeled.tolist() == [[0, 0, 1], [1, 1, 1], [2, 2, 1], [2, 3, 0]]


def test_columns_of_ids_that_are_not_named_may_hold_anything(write: Write) -> None:
    pairs = {"query": ["q", "r"], "document": ["a", "b"], "negatives": [["c"], []]}
    ids = {"query_id": [["x"], ["y"]], "document_id": [b"0", b"1"], "negative_ids": [1.5, None]}
    expected = pair_task(write("without", **pairs), None, NAMES)
    found = pair_task(write("with", **pairs, **ids), None, NAMES)
    assert (found.queries, found.documents) == (expected.queries, expected.documents)
    assert relevance_of(found) == relevance_of(expected)
    for role in ("query_id", "document_id"):
        with pytest.raises(DataError, match=f"ids must be numbers or text, column '{role}'"):
            pair_task(write("with", **pairs, **ids), None, replace(NAMES, **{role: role}))


def test_a_document_is_ranked_once_by_the_best_of_its_texts(write: Write) -> None:
    documents = ["red", "blue", "navy", "sky", "green"]
    columns = {"query": ["q"] * 5, "document": documents}
    task = pair_task(
        write("ids", **columns, document_id=[1, 2, 2, 2, 3], label=[0, 0, 1, 0, 1]), None, BY_DOCUMENT
    )
    cosine = torch.tensor([0.1, 0.0, 0.9, 0.8, 0.5])
    document = torch.stack([cosine, (1 - cosine**2).sqrt()], dim=1)
    similarity, ranked = task.rank(search, torch.tensor([[1.0, 0.0]]), document)
    assert ranked.tolist() == [[1, 4, 0, -1, -1]]
    np.testing.assert_allclose(similarity[0, :3], [0.9, 0.5, 0.1], rtol=1e-6)
    scores = retrieval_scores(ranked, task.relevance)
    assert (scores["recall_at_1"], scores["map"]) == (0.5, 1.0)  # of two relevant documents
    plain = pair_task(write("plain", **columns), None, NAMES)
    assert plain.rank(search, torch.tensor([[1.0, 0.0]]), document)[1].tolist() == [[2, 3, 4, 0, 1]]


def test_documents_of_many_texts_leave_room_for_others(write: Write) -> None:
    texts = [f"word {number}" for number in range(500)]  # the first document has 401
    ids = [max(number, 400) for number in range(500)]
    pairs = {"query": ["word 3"] + ["other"] * 499, "document": texts, "document_id": ids}
    task = pair_task(write("test", **pairs), None, BY_DOCUMENT)
    for find in (tfidf_search, bm25_search):
        _, ranked = task.rank(find, ["word 3"], texts)
        assert ranked.shape == (1, 100)
        assert ranked[0].tolist() == [0, *range(401, 500)]


def test_ids_that_join_most_queries_are_reported(write: Write, capsys: pytest.CaptureFixture[str]) -> None:
    texts = [f"text {number}" for number in range(100)]
    test = write("test", query=texts, document=texts, query_id=[7] * 100)
    for quiet in (False, True):
        pair_task(test, None, replace(NAMES, query_id="query_id"), quiet=quiet)
        lines = [line for line in capsys.readouterr().err.splitlines() if "rename the column" in line]
        assert len(lines) == int(not quiet)
        assert quiet or lines[0].startswith("100 of 100 different query texts are one query")


def benchmark(write: Write, **changes: Any) -> tuple[str, str, str]:
    """Write relevance, queries and documents, each in a different order; return the paths."""
    sets = {
        "judgments": {"query_id": [8, 7, 8], "document_id": ["y", "x", "z"], "label": [2, 1, 0]},
        "queries": {"query_id": [7, 8, 9], "query": ["q", "r", "s"]},
        "documents": {"document_id": ["z", "y", "x", "w"], "document": ["c", "b", "a", "d"]},
    }
    for key, values in changes.items():
        of_set, _, column = key.partition("__")
        sets[of_set][column] = values
    paths = [write(name, **columns) for name, columns in sets.items()]
    return paths[0], paths[1], paths[2]


def test_relevance_is_joined_with_texts_by_id(write: Write) -> None:
    task = benchmark_task(*benchmark(write), NAMES)
    assert (task.queries, task.documents) == (["q", "r", "s"], ["c", "b", "a", "d"])
    assert relevance_of(task) == {("q", "a", 1), ("r", "b", 2), ("r", "c", 0)}
    assert excluded(task) == set()
    assert task.sizes == {"num_train": 0, "num_test": 3, "num_invalid": 0}
    assert task.labeled is None


@pytest.mark.parametrize("seed", range(3))
def test_pairs_and_equivalent_relevance_files_make_the_same_task(write: Write, seed: int) -> None:
    random, words = Random(seed), list("abcdefgh")  # few texts, so that queries are also documents
    pairs = [(random.choice(words), random.choice(words), random.choice([0, 0, 1, 2])) for _ in range(12)]
    query, document, label = (list(column) for column in zip(*dict.fromkeys(pairs), strict=True))
    expected = pair_task(write("pairs", query=query, document=document, label=label), None, NAMES)
    queries, documents = sorted(set(query)), sorted(set(document))
    task = benchmark_task(
        write("judgments", q=[ord(text) for text in query], document_id=document, grade=label),
        write("queries", q=[ord(text) for text in queries], query=queries),
        write("documents", document_id=documents, document=documents),
        ColumnNames(query_id="q", label="grade"),
    )
    assert (relevance_of(task), excluded(task)) == (relevance_of(expected), excluded(expected))
    assert excluded(task)
    assert task.sizes == expected.sizes


def test_each_document_with_a_querys_own_text_is_excluded(write: Write) -> None:
    task = benchmark_task(*benchmark(write, documents__document=["r", "r", "s", "r"]), NAMES)
    # "y" is relevant to the second query and "z" is not; the first document of "s" matches another query.
    assert task.excluded.tolist() == [[1, 0], [1, 3], [2, 2]]


@pytest.mark.parametrize(
    ("changes", "queries", "num_test", "num_invalid"),
    [
        ({"queries__query": ["", "r", "s"], "documents__document": ["c", "b", "a", None]}, ["r", "s"], 3, 2),
        ({"judgments__label": [2, None, 0]}, ["q", "r", "s"], 2, 1),
        ({"judgments__label": [2.0, None, 0.0]}, ["q", "r", "s"], 2, 1),
    ],
    ids=["texts", "grades", "floats"],
)
def test_relevance_with_invalid_texts_or_without_grades_is_skipped_and_counted(
    write: Write, changes: Any, queries: list[str], num_test: int, num_invalid: int
) -> None:
    task = benchmark_task(*benchmark(write, **changes), NAMES)
    assert task.queries == queries
    assert relevance_of(task) == {("r", "b", 2), ("r", "c", 0)}
    assert (task.sizes["num_test"], task.sizes["num_invalid"]) == (num_test, num_invalid)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"documents__document_id": ["z", "y", "x", "z"]}, "id z comes twice in .*documents"),
        ({"queries__query_id": [7, 8, 7]}, "id 7 comes twice in .*queries"),
        ({"judgments__document_id": ["y", "v", "z"]}, "about id v, which .*documents lacks"),
        ({"judgments__query_id": [8, 6, 8]}, "about id 6, which .*queries lacks"),
        ({"judgments__query_id": [8, None, 8]}, "about id None, which .*queries lacks"),
        ({"judgments__label": pa.array([None] * 3, pa.int64())}, "none of the 3 rows of .*judgments"),
        ({"queries__query": ["", None, " "]}, "none of the 3 rows of .*queries"),
        ({"documents__document": [None, "", "", ""]}, "none of the 4 rows of .*documents"),
    ],
)
def test_benchmarks_that_cannot_be_evaluated_are_refused(write: Write, changes: Any, says: str) -> None:
    with pytest.raises(DataError, match=says) as caught:
        benchmark_task(*benchmark(write, **changes), NAMES)
    assert ";" in str(caught.value)  # with the remedy


@pytest.mark.parametrize("is_benchmark", [False, True], ids=["pairs", "benchmark"])
@pytest.mark.parametrize(
    ("label", "says"),
    [
        ([0, 1, 17], "grades of relevance must be 0 to 10, got 0 to 17; check the label column"),
        ([0, 0, 0], "none of the 3 queries has a relevant document, .*; check the label column"),
    ],
)
def test_labels_that_cannot_be_scored_are_refused_before_anything_is_embedded(
    label: list[int],
    says: str,
    is_benchmark: bool,
    write: Write,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(retrieval, "embed_values")
    save(small_config("two_tower"), tmp_path / "run")
    sets = {"test": write("test", query=["q", "r", "s"], document=["a", "b", "c"], label=label)}
    if is_benchmark:
        paths = benchmark(write, judgments__label=label)
        sets = dict(zip(("test", "queries", "documents"), paths, strict=True))
    with pytest.raises(DataError, match=says):
        evaluate_retrieval(run=str(tmp_path / "run"), **sets, quiet=True)


@pytest.mark.parametrize(
    ("name", "lacking"), [("query-id", "queries"), ("_id", "judgments"), (None, "judgments")]
)
def test_ids_that_judgments_and_sets_name_differently_are_refused_with_a_remedy(
    name: str | None, lacking: str, write: Write
) -> None:
    paths = (
        write("judgments", **{"query-id": [7], "document_id": ["x"], "label": [1]}),
        write("queries", _id=[7], query=["q"]),
        write("documents", document_id=["x"], document=["a"]),
    )
    words = (
        rf"{lacking} has no column '{name or 'query_id'}'; it has .*alike .*; rename it in one of the files"
    )
    with pytest.raises(DataError, match=words):
        benchmark_task(*paths, ColumnNames(query_id=name))


def test_documents_without_ids_are_searched_and_ids_may_be_numbers_or_texts(write: Write) -> None:
    ids, texts = ["z", "y", "x", None, None], ["c", "b", "a", "d", "e"]
    changes = {"documents__document_id": ids, "documents__document": texts}
    task = benchmark_task(*benchmark(write, judgments__query_id=["8", "7", "8"], **changes), NAMES)
    assert task.documents == texts
    assert relevance_of(task) == {("q", "a", 1), ("r", "b", 2), ("r", "c", 0)}


def test_relevance_needs_grades(write: Write) -> None:
    _, queries, documents = benchmark(write)
    judgments = write("judgments", query_id=[7], document_id=["x"])
    with pytest.raises(DataError, match="no grades; name the column"):
        benchmark_task(judgments, queries, documents, NAMES)


def test_images_search_all_captions_and_share_equal_captions(write: Write) -> None:
    captions = [["a cat", "a pet"], ["a dog", "a pet"], ["", None], ["a bird", "a bird", ""]]
    task = image_task(
        read_captioned_images(write("images", image=[b"1", b"2", b"3", b"4"], caption=captions), NAMES)
    )
    assert task.queries == [b"1", b"2", b"4"]
    assert task.documents == ["a cat", "a pet", "a dog", "a bird"]
    assert task.relevance.tolist() == [[0, 0, 1], [0, 1, 1], [1, 1, 1], [1, 2, 1], [2, 3, 1]]
    assert task.sizes == {"num_train": 0, "num_test": 3, "num_invalid": 1}
    single = image_task(
        read_captioned_images(write("single", image=[b"1", b"2"], caption=["a cat", "a dog"]), NAMES)
    )
    assert relevance_of(single) == {(b"1", "a cat", 1), (b"2", "a dog", 1)}


def test_a_row_per_caption_makes_the_task_of_a_row_per_image(write: Write) -> None:
    rows = [(b"1", "a cat"), (b"2", "a dog"), (b"1", "a pet"), (b"2", "a pet")]
    images, captions = (list(column) for column in zip(*rows, strict=True))
    flat = image_task(read_captioned_images(write("flat", image=images, caption=captions), NAMES))
    lists = write("lists", image=[b"1", b"2"], caption=[["a cat", "a pet"], ["a dog", "a pet"]])
    assert flat.queries == [b"1", b"2"]
    assert relevance_of(flat) == relevance_of(image_task(read_captioned_images(lists, NAMES)))
    assert len(flat.relevance) == 4
    assert flat.sizes == {"num_train": 0, "num_test": 4, "num_invalid": 0}


@pytest.mark.parametrize(
    "label",
    [["cat", "dog", "dog"], [2, -1, None], [0.5, 4.0, 2.5]],
    ids=["classes", "missing integers", "floats"],
)
def test_a_column_label_is_not_read_of_sets_whose_labels_have_no_meaning(
    label: list[Any], write: Write
) -> None:
    images = {"image": [b"1", b"2", b"3"], "caption": ["a cat", "a dog", "a bird"]}
    labeled, plain = (
        image_task(read_captioned_images(write("images", **images, **more), NAMES))
        for more in ({"label": label}, {})
    )
    assert (labeled.queries, labeled.sizes) == (plain.queries, plain.sizes)
    assert relevance_of(labeled) == relevance_of(plain)
    sets = benchmark(write, queries__label=label, documents__label=[*label, label[0]])
    assert relevance_of(benchmark_task(*sets, NAMES)) == relevance_of(
        benchmark_task(*benchmark(write), NAMES)
    )


def test_an_image_that_is_missing_or_cannot_be_read_is_an_invalid_row(write: Write) -> None:
    images = pa.array([{"bytes": b"1", "path": None}, None, {"bytes": None, "path": "/no/such.png"}])
    task = image_task(
        read_captioned_images(write("images", image=images, caption=["a cat", "a dog", "a bird"]), NAMES)
    )
    assert (task.queries, task.documents) == ([b"1"], ["a cat"])
    assert task.sizes == {"num_train": 0, "num_test": 1, "num_invalid": 2}


def test_images_that_cannot_be_decoded_are_skipped_counted_and_named(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(small_config("clip"), tmp_path / "run")
    images, captions = digit_files(4)[0], ["a zero", "a one", "a two", "a three"]
    whole = write("whole", image=images, caption=captions)
    broken = [*images[:2], b"broken", *images[2:], b"broken", images[3][:60]]
    broken = write("broken", image=broken, caption=[*captions[:2], "lost", *captions[2:], "more", "cut"])
    expected = evaluate_retrieval(run=str(tmp_path / "run"), test=whole, quiet=True)
    capsys.readouterr()
    found = evaluate_retrieval(run=str(tmp_path / "run"), test=broken)
    assert found == {**expected, "num_invalid": 3}
    err = capsys.readouterr().err
    assert f"3 of 7 rows of {broken} are invalid and are skipped: 2 not an image" in err
    assert "for example broken row 2 (not an image); broken row 5 (not an image); broken row 6 (" in err
    none = write("none", image=[b"broken"], caption=["lost"])
    with pytest.raises(DataError, match="none of the 1 rows of .*none can be used"):
        evaluate_retrieval(run=str(tmp_path / "run"), test=none, quiet=True)


def test_retrieval_refuses_splits_of_one_folder(tmp_path: Path) -> None:
    for split in ("train", "test"):
        pq.write_table(pa.table({"query": ["q"], "document": ["d"]}), tmp_path / f"{split}.parquet")
    with pytest.raises(DataError, match="holds a data set in 2 splits; give --data .*/test.parquet or"):
        pair_task(str(tmp_path), None, NAMES)


@pytest.mark.parametrize("kind", [pa.string(), pa.int64(), pa.null()])
def test_pairs_without_any_label_in_their_column_are_refused(kind: pa.DataType, write: Write) -> None:
    labels = pa.array([None, None], kind)
    with pytest.raises(
        DataError, match="none of the 2 rows of .*pairs can be used: texts, images, labels or ids"
    ):
        pair_task(write("pairs", query=["q", "r"], document=["a", "b"], label=labels), None, NAMES)


@pytest.mark.parametrize("seed", range(3))
def test_a_reversed_task_searches_queries_by_relevant_documents(seed: int) -> None:
    rng = np.random.default_rng(seed)
    task = Task(
        queries=[f"q{n}" for n in range(6)],
        documents=[f"d{n}" for n in range(9)],
        relevance=np.unique(rng.integers(0, (6, 9, 3), (12, 3)), axis=0),
        num_test=12,
        num_invalid=1,
    )
    reverse = task.reversed()
    relevant = {document for _, document, grade in relevance_of(task) if grade > 0}
    assert (
        reverse.queries
        == sorted(relevant)
        == [task.documents[number] for number in task.relevant_documents()]
    )
    assert reverse.documents == task.queries
    assert relevance_of(reverse) == {(d, q, grade) for q, d, grade in relevance_of(task) if d in relevant}
    assert 0 < len(relevant) < len({document for _, document, _ in relevance_of(task)})
    assert reverse.sizes == task.sizes


def test_data_sets_without_a_valid_row_are_refused(write: Write) -> None:
    good = write("good", query=["q"], document=["d"])
    bad = write("bad", query=["", "q"], document=["d", None])
    for test, train in ((bad, None), (good, bad)):
        with pytest.raises(DataError, match="none of the 2 rows of .*bad can be used.*; fix the data"):
            pair_task(test, train, NAMES)
    images = write("images", image=[b"1"], caption=pa.array([[]], pa.list_(pa.string())))
    with pytest.raises(DataError, match="none of the 1 rows of .*images can be used"):
        image_task(read_captioned_images(images, NAMES))


def test_data_sets_that_would_be_ignored_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="leave out --train"):
        evaluate_retrieval(run="run", test="judgments", queries="queries", documents="documents", train="t")
    save(small_config("clip"), tmp_path)
    sets: list[dict[str, Any]] = [{"train": "t"}, {"queries": "queries", "documents": "documents"}]
    for others in sets:
        with pytest.raises(ConfigError, match="within the set of --test alone; leave the other sets out"):
            evaluate_retrieval(run=str(tmp_path), test="captioned", **others)


def test_documents_without_words_are_evaluated_without_a_baseline(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    save(small_config(), tmp_path / "run")
    test = write("test", query=["a", "b"], document=["+-", "\u2192"], label=[1, 0])
    found = evaluate_retrieval(run=str(tmp_path / "run"), test=test, quiet=True)
    assert found["num_queries"] == 1
    assert not {"baseline", "hybrid"} & found.keys()
    assert "raycl: no baseline of words: the documents have no words" in capsys.readouterr().err


def test_examples_of_images_are_refused(tmp_path: Path) -> None:
    save(small_config("clip"), tmp_path)
    with pytest.raises(ConfigError, match="examples are of texts.*; leave them out"):
        evaluate_retrieval(run=str(tmp_path), test="captioned", examples=2)


@pytest.mark.parametrize(("num", "queries"), [(1, ["a b"]), (2, ["a b", "c"]), (5, ["a b", "c"])])
def test_examples_leave_out_the_documents_that_a_query_ignores(
    num: int, queries: list[str], tmp_path: Path, write: Write
) -> None:
    save(small_config(), tmp_path / "run")
    test = write("test", query=["a b", "c"], document=["d", "e"])
    train = write("train", query=["a b", "x"], document=["f", "a b"])
    options: dict[str, Any] = {"baseline": False, "examples": num, "quiet": True}
    found = evaluate_retrieval(run=str(tmp_path / "run"), test=test, train=train, **options)["examples"]
    expected = {"a b": ["d", "e"], "c": ["a b", "d", "e", "f"]}
    assert [each["query"] for each in found] == queries
    for each in found:
        assert sorted(near["document"] for near in each["nearest"]) == expected[each["query"]]


def test_the_files_that_are_not_read_are_named(
    tmp_path: Path, write: Write, capsys: pytest.CaptureFixture[str]
) -> None:
    save(small_config(), tmp_path / "run")

    def folder(name: str, **columns: list[Any]) -> str:
        file = Path(write(f"{name}.parquet", **columns))
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.md").touch()
        file.rename(tmp_path / name / file.name)
        return str(tmp_path / name)

    test = folder("test", query=["a b", "c"], document=["d", "e"])
    train = folder("train", query=["a b"], document=["f"])
    judgments = folder("judgments", query_id=[1], document_id=[2], label=[1])
    queries = folder("queries", query_id=[1], query=["a"])
    documents = folder("documents", document_id=[2], document=["b"])
    judged = {"test": judgments, "queries": queries, "documents": documents}
    for sets in ({"test": test, "train": train}, judged):
        for quiet in (True, False):
            options: dict[str, Any] = {**sets, "baseline": False, "quiet": quiet}
            evaluate_retrieval(run=str(tmp_path / "run"), **options)
            lines = [each for each in capsys.readouterr().err.splitlines() if "not read" in each]
            assert lines == ([] if quiet else [f"files not read in {each}: 1 .md" for each in sets.values()])


def test_retrieval_of_images_needs_an_encoder_of_captions(tmp_path: Path) -> None:
    save(small_config("clip"), tmp_path / "both")
    with pytest.raises(DataError, match="there is nothing at .*captioned"):  # tried to read the data set
        evaluate_retrieval(run=str(tmp_path / "both"), test=str(tmp_path / "captioned"))
    encoder = image_encoder()
    save_encoder(encoder.network, encoder.spec, Place(str(tmp_path / "images")))
    with pytest.raises(ConfigError, match="an encoder of images and none of captions; use knn or linear"):
        evaluate_retrieval(run=str(tmp_path / "images"), test=str(tmp_path / "captioned"))
