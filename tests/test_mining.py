"""Mining of hard negatives: valid rows, and documents that must not become negatives."""

import math
from collections import Counter
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from random import Random
from typing import Any
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from raycl.data.columns import ColumnNames
from raycl.data.ids import entity_id
from raycl.data.matches import SPARE
from raycl.errors import ConfigError, DataError
from raycl.evaluation.retrieval import evaluate_retrieval
from raycl.evaluation.search import search
from raycl.inference.mining import Mined, _Pairs, mine_negatives
from raycl.inference.reading import Values, read_pairs, read_values
from tests.pairs import small_config
from tests.test_saved_text import save

PAIRS = ColumnNames(image=None, query="query", document="document")


def joined(parts: Iterable[tuple[pa.Table, dict[str, int]]]) -> tuple[pa.Table, Mined]:
    """Return one table and all counts."""
    tables, counts = [], Counter[str]()
    for table, some in parts:
        tables.append(table)
        counts.update(some)
    return pa.concat_tables(tables), Mined(**counts)


def test_rows_without_text_or_label_are_skipped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    rows = {"query": ["a", "b", " ", "d"], "document": ["x", "y", "z", "x"], "label": [1, None, 1, 0]}
    pq.write_table(pa.table(rows), path)
    found = read_values(str(path), PAIRS)
    assert found.by_role["query"] == ["a", "d"]
    assert (found.label.tolist(), found.num_invalid) == ([1, 0], 2)


@pytest.mark.parametrize("texts", [["True", "false", "TRUE"], ["1.0", "0.0", "1"], ["1", "0", "1"]])
def test_labels_in_text_are_read_as_in_training(texts: list[str], tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    lines = [f"q{place},d,{text}" for place, text in enumerate(texts)]
    path.write_text("\n".join(["query,document,label", *lines, "q,d,"]) + "\n")
    assert read_values(str(path), PAIRS).label.tolist() == [1, 0, 1]


@pytest.mark.parametrize("label", [["0", "1", ""], ["0.0", "1", "NaN"], [0.0, 1.0, math.nan]])
def test_rows_whose_label_is_empty_or_nan_are_skipped(label: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    pairs = {"query": ["a", "b", "c"], "document": ["x", "y", "z"]}
    pq.write_table(pa.table(pairs | {"label": pa.array(label)}), path)
    found = read_values(str(path), PAIRS)
    assert (found.label.tolist(), found.num_invalid) == ([0, 1], 1)


@pytest.mark.parametrize("text", ["good", "1.5", "inf"])
def test_labels_that_are_no_grades_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "pairs.csv"
    path.write_text(f"query,document,label\nq,d,1\nq,e,{text}\nq,e,no\n")
    with pytest.raises(DataError, match="labels of pairs must be grades such as 0 and 1"):
        read_values(str(path), PAIRS)


def test_a_match_of_a_query_never_becomes_its_negative() -> None:
    by_role = {"query": ["q", "q", "q", "q"], "document": ["good", "fine", "good", "bad"]}
    pairs = _Pairs(Values(by_role=by_role, label=np.array([1, 1, 0, 0])))
    nearest = np.array([[2]])
    table, mined = joined(pairs.with_mined((np.array([[0.1]]), nearest), np.array([0.9, 0.9]), 3, 0.95))
    assert table["document"].to_pylist() == ["good", "fine"]
    # The document with contradictory labels is not a negative; explicit negatives are not added again.
    assert table["negatives"].to_pylist() == [["bad"], ["bad"]]
    assert (mined.num_pairs, mined.num_negatives) == (2, 0)


def test_documents_that_a_chain_of_ids_joins_stay_joined_in_the_mined_file() -> None:
    by_role = {"query": ["q", "r", "s"], "document": ["a", "a", "b"], "document_id": [1, 2, 2]}
    pairs = _Pairs(Values(by_role=by_role, label=np.full(3, -1)))
    nowhere = np.full((3, 1), -1)
    table, _ = joined(pairs.with_mined((np.zeros((3, 1)), nowhere), np.full(3, 0.8), 3, 0.95))
    again = {role: table[role].to_pylist() for role in by_role}
    assert again["document"] == ["a", "a", "b"]
    known = _Pairs(Values(by_role=again, label=np.full(3, -1))).document
    assert [known.entity[known.number[text]] for text in ("a", "b")] == [0, 0]


def test_documents_too_similar_to_the_query_are_skipped_and_counted() -> None:
    by_role = {"query": ["q", "r", "s"], "document": ["a", "b", "c"]}
    pairs = _Pairs(Values(by_role=by_role, label=np.full(3, -1)))
    similarity, place = np.array([[0.9, 0.7]] * 3), np.array([[1, 2], [0, 2], [0, 1]])
    table, mined = joined(pairs.with_mined((similarity, place), np.full(3, 0.8), 3, 0.95))
    assert table["negatives"].to_pylist() == [["c"], ["c"], ["b"]]
    assert (mined.num_negatives, mined.num_too_near) == (3, 3)


def test_explicit_negatives_near_the_query_are_kept_and_not_counted_as_too_near() -> None:
    by_role = {"query": ["q"], "document": ["good"], "negatives": [["bad", "worse"]]}
    pairs = _Pairs(Values(by_role=by_role, label=np.array([-1])))
    table, mined = joined(
        pairs.with_mined((np.array([[0.9, 0.8]]), np.array([[1, 2]])), np.array([0.8]), 3, 0.95)
    )
    assert table["negatives"].to_pylist() == [["bad", "worse"]]
    assert (mined.num_negatives, mined.num_too_near) == (0, 0)


def test_enough_candidates_remain_beside_explicit_negatives_that_are_the_nearest() -> None:
    by_role = {"query": ["q", "r"], "document": ["a", "b"], "negatives": [list("123"), []]}
    assert _Pairs(Values(by_role=by_role, label=np.full(2, -1))).known.spare == SPARE
    by_role["negatives"] = [[f"{n}" for n in range(60)], []]
    pairs = _Pairs(Values(by_role=by_role, label=np.full(2, -1)))
    assert pairs.known.spare == 60 + SPARE // 2
    by_role["negatives"] = [[f"{n}" for n in range(9_999)], []]
    assert _Pairs(Values(by_role=by_role, label=np.full(2, -1))).known.spare == 512


def test_the_pairs_of_a_query_with_many_negatives_share_them() -> None:
    by_role = {
        "query": ["q"] * 4,
        "document": list("abcd"),
        "negatives": [[f"{n}" for n in range(200)], ["x"], [], []],
    }
    pairs = _Pairs(Values(by_role=by_role, label=np.full(4, -1)))
    nothing = np.array([[-np.inf]]), np.array([[-1]])
    table, _ = joined(pairs.with_mined(nothing, np.ones(4), 3, 0.95))
    negatives = table["negatives"].to_pylist()
    assert list(map(len, negatives)) == [64] * 4
    assert {text for each in negatives for text in each} == {*by_role["negatives"][0], "x"}


def test_ids_that_join_a_large_part_of_the_texts_are_reported() -> None:
    num = 300
    names = [f"{number}" for number in range(num)]
    by_role = {"query": names, "document": names, "document_id": list(range(num))}
    label = np.full(num, -1)
    # Each session has a query of the one before: all of them are one.
    sessions = {"query": [*names, *names[1:]], "document": [*names, *names[1:]]}
    joined_ids = _Pairs(
        Values(
            by_role={**sessions, "query_id": [*range(num), *range(num - 1)]}, label=np.full(2 * num - 1, -1)
        )
    )
    assert _Pairs(Values(by_role=by_role, label=label)).known.notices() == []
    line, of_matches = joined_ids.known.notices()
    assert of_matches == "300 of 300 queries match all documents, and get no mined negatives"
    assert "300 of 300 different query texts are one query" in line
    some = {**by_role, "document_id": [0] * 99 + list(range(99, num))}
    assert _Pairs(Values(by_role=some, label=label)).known.notices() == []
    (line,) = _Pairs(
        Values(by_role={**some, "document_id": [0] * 100 + list(range(100, num))}, label=label)
    ).known.notices()
    assert "100 of 300 different document texts are one document" in line


def test_pairs_are_written_in_groups_of_rows_also_without_any_negative() -> None:
    names = [f"{number}" for number in range(2_500)]
    by_role = {"query": names, "document": names, "document_id": list(range(2_500))}
    pairs = _Pairs(Values(by_role=by_role, label=np.full(2_500, -1)))
    nothing = np.full((2_500, 1), -np.inf), np.full((2_500, 1), -1)
    tables = [table for table, _ in pairs.with_mined(nothing, np.ones(2_500), 3, 0.95)]
    assert list(map(len, tables)) == [1_024, 1_024, 452]
    assert pa.concat_tables(tables)["document"].to_pylist() == names
    lists = {"negatives": pa.list_(pa.string()), "negative_ids": pa.list_(pa.int64())}
    assert {name: tables[0].schema.field(name).type for name in lists} == lists


def test_ids_that_many_rows_share_take_no_memory_for_each_two_of_them() -> None:
    num, names = 500, ("query", "document", "other")
    texts = {name: [f"{name} {number}" for number in range(num)] for name in names}
    by_role = {
        "query": texts["query"],
        "document": texts["document"],
        "negatives": [[text] for text in texts["other"]],
        "query_id": [1] * num,
        "document_id": [1] * num,
        "negative_ids": [[2]] * num,
    }
    pairs = _Pairs(Values(by_role=by_role, label=np.full(num, -1)))
    excluded, entities = exclusions(pairs).values()
    assert sum(each.nbytes for each in (excluded, *entities)) < 100 * num
    query, document = embedded(pairs.query.texts), embedded(pairs.document.texts)
    _, found = search(query, document, k=num, excluded=excluded, entities=entities)
    assert [pairs.document.texts[place] for place in np.unique(found)] == texts["other"]


def test_relevance_judgments_without_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="documents is missing: give --set documents=URI"):
        evaluate_retrieval(run="run", test="judgments", queries="queries")


def draw(num_rows: int, seed: int) -> dict[str, list[Any]]:
    """Return pairs with negatives; texts have several ids, and ids have several texts.

    Some texts are both queries and documents.
    """
    random = Random(seed)

    def things(number: int) -> list[tuple[str, int]]:
        return [(f"text {random.randrange(40)}", random.randrange(50)) for _ in range(number)]

    rows = {
        name: [] for name in ("query", "document", "negatives", "query_id", "document_id", "negative_ids")
    }
    for (query, query_id), (document, document_id) in zip(things(num_rows), things(num_rows), strict=True):
        negatives = things(random.randrange(3))
        values = query, document, [text for text, _ in negatives]
        ids = query_id, document_id, [each for _, each in negatives]
        for column, value in zip(rows.values(), (*values, *ids), strict=True):
            column.append(value)
    return rows


def embedded(texts: Iterable[str]) -> torch.Tensor:
    """Return synthetic unit embeddings, the same for the same text."""
    seeds = [crc32(text.encode()) for text in texts]
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.nn.functional.normalize(torch.stack(rows))


def exclusions(pairs: _Pairs) -> dict[str, Any]:
    """Return the arguments of a search that finds no match."""
    known = pairs.known
    return {
        "excluded": known.of_entities(),
        "entities": (np.array(known.query.entity), np.array(known.document.entity)),
    }


def mined_from(by_role: dict[str, list[Any]], label: list[int] | None = None) -> tuple[list[Any], Mined]:
    """Mine three negatives per pair with these embeddings, without a similarity limit."""
    pairs = _Pairs(Values(by_role=by_role, label=np.array(label or [-1] * len(by_role["query"]))))
    query, document = embedded(pairs.query.texts), embedded(pairs.document.texts)
    found = search(query, document, k=len(document), **exclusions(pairs))
    table, mined = joined(pairs.with_mined(found, np.ones(len(pairs.known.positive)), 3, 1.0))
    return table.to_pylist(), mined


def plain_groups(texts: list[str], ids: list[int]) -> dict[str, set[str]]:
    """Group texts that share ids, merging groups until nothing changes."""
    named = set(zip(texts, ids, strict=True))
    groups = {text: {text} for text in texts}
    while True:
        joined = {
            text: {
                other
                for other, each in named
                if any((name, each) in named for name in group) or other in group
            }
            for text, group in groups.items()
        }
        if joined == groups:
            return groups
        groups = joined


@pytest.mark.parametrize("seed", range(4))
def test_the_nearest_documents_without_matching_text_or_id_become_negatives(seed: int) -> None:
    rows = draw(25, seed)
    texts = [*rows["document"], *chain(*rows["negatives"])]
    ids = [*rows["document_id"], *chain(*rows["negative_ids"])]
    queries, documents = plain_groups(rows["query"], rows["query_id"]), plain_groups(texts, ids)
    pairs = list(dict.fromkeys(zip(rows["query"], rows["document"], strict=True)))
    own = [(query, query) for query in queries if query in documents]
    matches = {(q, d) for query, text in [*pairs, *own] for q in queries[query] for d in documents[text]}
    assert own
    assert len(matches) > len({*pairs, *own})  # ids match more than texts do

    def once(query: str, answers: Iterable[str]) -> list[str]:
        """Return the non-matching texts, without duplicates."""
        kept: list[str] = []
        for text in answers:
            if (query, text) not in matches and not documents[text] & set(kept):
                kept.append(text)
        return kept

    def first_id(group: set[str], names: list[str], ids: list[int]) -> int:
        return next(each for name, each in zip(names, ids, strict=True) if name in group)

    query_id = {text: first_id(group, rows["query"], rows["query_id"]) for text, group in queries.items()}
    document_id = {text: first_id(group, texts, ids) for text, group in documents.items()}
    expected, num_mined = [], 0
    for query, document in pairs:
        asked = zip(rows["query"], rows["negatives"], strict=True)
        explicit = once(query, chain(*(negatives for other, negatives in asked if other in queries[query])))
        order = (embedded(documents) @ embedded([query])[0]).argsort(descending=True)
        nearest = [list(documents)[place] for place in order.tolist()]
        negatives = once(query, [*explicit, *nearest])[: len(explicit) + 3]
        num_mined += len(negatives) - len(explicit)
        values = query, document, negatives
        named = query_id[query], document_id[document], [document_id[text] for text in negatives]
        expected.append(dict(zip(rows, (*values, *named), strict=True)))
    table, mined = mined_from(rows)
    assert table == expected
    assert (mined.num_pairs, mined.num_negatives) == (len(pairs), num_mined)


@pytest.mark.parametrize("label", [None, [1, 0, 1, 2] * 5])
def test_ids_equivalent_to_the_texts_change_nothing(label: list[int] | None) -> None:
    rows = draw(20, 0)
    texts = {role: rows[role] for role in ("query", "document", "negatives")}
    ids = {
        "query_id": [crc32(text.encode()) for text in rows["query"]],
        "document_id": [crc32(text.encode()) for text in rows["document"]],
        "negative_ids": [[crc32(text.encode()) for text in each] for each in rows["negatives"]],
    }
    (plain, expected), (named, mined) = mined_from(texts, label), mined_from(texts | ids, label)
    assert mined == expected
    assert [{role: row[role] for role in texts} for row in named] == plain
    for row in named:
        assert row["query_id"] == crc32(row["query"].encode())
        assert row["document_id"] == crc32(row["document"].encode())
        assert row["negative_ids"] == [crc32(text.encode()) for text in row["negatives"]]


def test_ids_are_written_if_the_dataset_has_them() -> None:
    rows = draw(10, 1)
    written = {
        "query document query_id": {"query_id"},
        "query document document_id": {"document_id", "negative_ids"},
        "query document negatives document_id": {"document_id"},
        "query document negatives document_id negative_ids": {"document_id", "negative_ids"},
        "query document negatives negative_ids": set(),
    }
    for names, ids in written.items():
        table, _ = mined_from({name: rows[name] for name in names.split()})
        assert table[0].keys() == {"query", "document", "negatives"} | ids
        assert not any(None in row.get("negative_ids", []) for row in table)


def test_pairs_keep_their_weights_and_a_pair_with_two_weights_is_refused() -> None:
    rows = {"query": ["a", "b", "a", "c"], "document": ["x", "y", "x", "y"], "weight": [2, 0, 2, 0.5]}
    table, _ = mined_from(rows, [1, 1, 1, 0])
    assert [(row["query"], row["weight"]) for row in table] == [("a", 2), ("b", 0)]
    with pytest.raises(
        DataError, match="query 'a' and document 'x' has the weights 2 and 3; give all of its"
    ):
        mined_from(rows | {"weight": [2, 0, 3, 0.5]})


def test_pairs_and_ids_are_read_as_in_a_run_and_unusable_pairs_are_invalid(tmp_path: Path) -> None:
    path, names = str(tmp_path / "pairs.parquet"), ColumnNames(query="q", query_id="user")
    rows = {
        "q": ["a", "b", "c", "d", "e", "f"],
        "document": ["x", "y", "z", "x", "y", "z"],
        "negatives": [["n", "m"], ["n"], ["n", ""], None, ["n"], ["n"]],
        "user": ["a", "b", "c", "d", None, "f"],
        "document_id": [1, 2, 3, 4, 5, 6],
        "negative_ids": [[7, 8], [7, 8], [7, 8], None, [7], [None]],
    }
    pq.write_table(pa.table(rows), path)
    found = read_pairs(path, names)
    assert found.by_role == {
        "query": ["a", "d"],
        "document": ["x", "x"],
        "negatives": [["n", "m"], []],
        "query_id": [entity_id("a"), entity_id("d")],
        "document_id": [1, 4],
        "negative_ids": [[7, 8], []],
    }
    assert found.num_invalid == 4
    pq.write_table(pa.table(rows).slice(4), path)
    with pytest.raises(DataError, match="none of the 2 rows of .*can be used"):
        read_pairs(path, names)
    pq.write_table(pa.table(rows).drop(["negatives"]), path)  # ids without their column
    assert "negative_ids" not in read_pairs(path, names).by_role


def test_mined_pairs_are_read_back_with_the_same_ids(tmp_path: Path) -> None:
    rows, path = draw(15, 2), tmp_path / "mined.parquet"
    rows["query_id"] = [entity_id(f"user {each}") for each in rows["query_id"]]
    table, _ = mined_from(rows)
    pq.write_table(pa.Table.from_pylist(table), path)
    again = read_pairs(str(path), ColumnNames())
    assert again.num_invalid == 0
    assert again.by_role == {role: [row[role] for row in table] for role in table[0]}


def test_an_image_run_is_refused_before_reading_data(tmp_path: Path) -> None:
    save(small_config("clip"), tmp_path)
    with pytest.raises(ConfigError, match="an encoder of images; mine needs one of texts"):
        mine_negatives(str(tmp_path), str(tmp_path), str(tmp_path.parent / "mined.parquet"))
