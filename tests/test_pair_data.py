"""Pairs and texts from columns to rows: column names, grouping of click logs, and reading through Arrow."""

import math
import re
import time
from collections.abc import Callable, Sequence
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from raycl.config.overrides import override
from raycl.data import click_logs
from raycl.data.click_logs import (
    CONTRADICTED,
    REPEATED,
    WITHOUT_POSITIVE,
    _pairs_of_groups,
    _skipped_in,
    _valid_rows,
    group_source,
    grouped_columns,
    joined_groups,
    labels_as_given,
)
from raycl.data.codecs import Format, store_all
from raycl.data.columns import ColumnNames, check_labels, is_text
from raycl.data.decode import classes_of, row_error
from raycl.data.discovery import find_source
from raycl.data.ids import IdFormat, content_id, content_ids, entity_id, stable_id, stable_ids
from raycl.data.in_memory import InMemoryDataset
from raycl.data.read_stats import ReadStats
from raycl.data.sources import Fragment, RawRows, Source
from raycl.data.texts import TextFormat, TextsFormat, TokenLists, Tokens
from raycl.errors import DataError, InvalidValueError
from raycl.recipes import recipe
from raycl.tokenization import train_tokenizer
from raycl.training.data_module import DataModule, must_stream
from raycl.training.data_set import learn_vocabulary, read_vocabulary
from raycl.training.preflight import column_names, find_corpus, find_sources
from tests.pairs import vocabulary
from tests.table_files import write_rows
from tests.texts import invented_texts

TEXTS = invented_texts(40, seed=4)
TOKENIZER = vocabulary().tokenizer
MISSING = [None, float("nan"), np.float64("nan"), "", b""]
PAIRS = ColumnNames(image=None, query="q", document="d")

# Rows of a click log


def rows_of_log(labels: Sequence[Any], stats: ReadStats | None = None, **values: list[Any]) -> pa.Table:
    """Return the valid rows of a click log; without ``stats`` all must be valid."""
    where = [f"row {place}" for place in range(len(labels))]
    found = ReadStats() if stats is None else stats
    rows = _valid_rows(values, labels, where, found)
    assert found.num_rows == len(labels)
    assert stats is not None or not found.invalid
    return rows


def pairs_of(labels: Sequence[Any], **values: list[Any]) -> list[dict[str, Any]]:
    """Return the pairs of the rows of one query."""
    rows = rows_of_log(labels, **{"query": ["q"] * len(labels), **values})
    return _pairs_of_groups(with_joined_groups(rows) if "query_id" in values else rows).to_pylist()


def with_joined_groups(rows: pa.Table) -> pa.Table:
    joined, _ = joined_groups(rows)
    groups = [joined.get(group, group) for group in rows["group"].to_pylist()]
    return rows.set_column(0, "group", pa.array(groups, pa.int64()))


def counts_of(pairs: list[dict[str, Any]]) -> tuple[int, ...]:
    causes = (WITHOUT_POSITIVE, REPEATED, CONTRADICTED)
    return tuple(sum(pair[f"num_{cause}"] for pair in pairs) for cause in causes)


@pytest.mark.parametrize(
    ("labels", "clicked"),
    [
        ([1, True, 1.0, "1", "true", "TRUE", np.int64(1), np.bool_(True), np.float32(1)], True),
        ([0, False, 0.0, "0", "false", "FALSE", np.int8(0), np.bool_(False), np.float64(0)], False),
    ],
)
def test_labels_of_every_type_are_read_as_clicked_or_not(labels: list[Any], clicked: bool) -> None:
    rows = rows_of_log(labels, query=["q"] * len(labels), document=["d"] * len(labels))
    assert rows["clicked"].to_pylist() == [clicked] * len(labels)


@pytest.mark.parametrize(("num_rows", "num_parts"), [(1, 1), (20_000, 1), (50_000, 3), (50_000_000, 200)])
def test_a_log_is_grouped_in_parts_of_its_size(
    num_rows: int, num_parts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One fragment: a CSV file is cut into few of them, whatever its size.
    fragment = Fragment(uri="log.csv", first_id=0, stop=num_rows)
    source = Source(
        uri="log.csv", kind="csv", fragments=(fragment,), columns=PAIRS, classes=None, has_labels=True
    )
    labeled = MagicMock()
    monkeypatch.setattr(click_logs, "map_fragments", lambda *_: labeled)
    group_source(source, coordinator=None)
    whole_groups = {"keys": ["group"]} if num_parts > 1 else {}  # one part without a shuffle
    labeled.repartition.assert_called_once_with(num_parts, **whole_groups)
    labeled.groupby.assert_not_called()


@pytest.mark.parametrize("num_queries", [0, 1, 7])
def test_the_groups_of_one_part_are_the_queries(num_queries: int) -> None:
    rng = np.random.default_rng(num_queries)
    labels = rng.integers(0, 2, 60 * min(num_queries, 1)).tolist()
    query = [f"q{number}" for number in rng.integers(0, max(num_queries, 1), len(labels))]
    document = [f"d{number}" for number in rng.integers(0, 12, len(labels))]
    came = _pairs_of_groups(rows_of_log(labels, query=query, document=document)).to_pylist()
    expected = []
    for wanted in sorted(set(query), key=lambda text: content_id(text.encode())):
        own = [place for place, name in enumerate(query) if name == wanted]
        texts = {"query": [wanted] * len(own), "document": [document[place] for place in own]}
        expected += pairs_of([labels[place] for place in own], **texts)
    assert came == expected


@pytest.mark.parametrize(
    ("role", "values", "cause"),
    [
        ("label", [*MISSING, "nan", -1], "no label, or -1"),
        ("label", [2, 0.5, "yes", "01", b"1", [1]], "label other than 0 and 1"),
        *(
            (role, values, cause)
            for role in ("query", "document")
            for values, cause in (
                ([None, float("nan")], "missing value"),
                (["", " \n\t"], "empty text"),
                ([b"caf\xe9", "half a pair \ud83d"], "invalid UTF-8"),
                ([7], "int in place of a text"),
            )
        ),
        ("query_id", MISSING, "missing id"),
        ("document_id", MISSING, "missing id"),
        *((f"{side}_id", [2.0**53, -1e300], "id of 2^53 or more as float") for side in ("query", "document")),
    ],
)
def test_invalid_rows_of_a_click_log_are_counted_by_cause_with_their_positions(
    role: str, values: list[Any], cause: str
) -> None:
    stats, num = ReadStats(), len(values) + 1
    columns: dict[str, list[Any]] = {"query": ["q"] * num, "document": ["d"] * num, "label": [1] * num}
    columns |= {role: ["1", *values]}
    rows = rows_of_log(columns.pop("label"), stats, **columns)
    assert rows.num_rows == 1
    assert stats.invalid == {cause: len(values)}
    assert stats.examples == [f"row {place} ({cause})" for place in range(1, min(num, 4))]


@pytest.mark.parametrize(
    "label",
    [
        pa.array([1, None, 0]),
        pa.array([1.0, math.nan, 0.0]),
        pa.array([1.0, None, 0.0]),
        pa.array(["1", "", "0"]),
        pa.array(["yes", None, "no"]).dictionary_encode(),
    ],
)
def test_a_file_may_lack_the_label_of_a_click(label: pa.Array, tmp_path: Path) -> None:
    log = {"query": ["q"] * 3, "document": ["d", "e", "f"], "label": label}
    pq.write_table(pa.table(log), tmp_path / "log.parquet")
    source = find_source(str(tmp_path), ColumnNames(image=None, query="query", document="document"))
    (rows,) = source.read(source.fragments[0])
    stats = ReadStats()
    _valid_rows(rows.values, labels_as_given(rows, source), rows.where, stats)
    assert stats.invalid.pop("no label, or -1") == 1
    assert dict(stats.invalid) == ({"label other than 0 and 1": 2} if "yes" in label.to_pylist() else {})


def test_rows_are_grouped_by_the_text_of_the_query() -> None:
    by_text = rows_of_log([1, 0, 1], query=["boats", b"boats", "ships"], document=["d", "e", "f"])
    first, second, third = by_text["group"].to_pylist()
    assert first == second == content_id(b"boats") != third
    assert by_text["query"].to_pylist() == ["boats", "boats", "ships"]
    assert by_text["query_id"].null_count == by_text["document_id"].null_count == 3
    ids = {"query_id": [1, 2, 2], "document_id": ["x", "y", 7]}
    with_ids = rows_of_log([1, 1, 1], query=["boats", "boats", "ships"], document=["d", "e", "f"], **ids)
    assert with_ids["group"].to_pylist() == [first, first, third]  # before join_queries
    assert with_ids["query_id"].to_pylist() == [1, 2, 2]
    assert with_ids["document_id"].to_pylist() == [content_id(b"x"), content_id(b"y"), 7]
    assert rows_of_log([], query=[], document=[]).schema == with_ids.schema


def test_ids_of_sessions_are_noticed() -> None:
    queries = pa.table({"group": range(1_000), "query_id": [1] * 150 + list(range(2, 852))})
    joined, [line] = joined_groups(queries)
    assert joined == dict.fromkeys(range(1, 150), 0)
    assert line.startswith("150 of 1,000 different query texts are one query, since ids join them")
    assert joined_groups(queries.slice(100)) == (dict.fromkeys(range(101, 150), 100), [])


# The rows of one query


def test_each_positive_becomes_a_pair_with_all_documents_that_were_not_clicked() -> None:
    pairs = pairs_of(
        [1, 0, 1, 0],
        query=["q", "q", "q again", "q"],
        document=["first", "cold", "second", "dull"],
        query_id=[5] * 4,
        document_id=[10, 11, 12, 13],
    )
    found = [(pair["query"], pair["document"], pair["document_id"]) for pair in pairs]
    assert found == [("q", "first", 10), ("q again", "second", 12)]
    for pair in pairs:
        assert (pair["query_id"], pair["negatives"], pair["negative_ids"]) == (5, ["cold", "dull"], [11, 13])
    [without_ids] = pairs_of([1], document=["d"])
    assert without_ids["query_id"] is without_ids["document_id"] is None
    assert without_ids["negative_ids"] == []


def test_a_query_without_a_positive_has_no_pair_and_is_counted() -> None:
    pairs = pairs_of([0, 0, 0], document=["a", "b", "a"])
    assert [(pair["query"], pair["document"]) for pair in pairs] == [("q", None)]
    assert counts_of(pairs) == (1, 1, 0)


@pytest.mark.parametrize(("document", "document_id"), [("the same", 1), ("other words", 1), ("the same", 2)])
def test_documents_with_the_same_text_or_id_are_the_same(document: str, document_id: int) -> None:
    values: dict[str, list[Any]] = {"document": ["the same", document], "document_id": [1, document_id]}
    assert counts_of(pairs_of([1, 1], **values)) == (0, 1, 0)
    assert counts_of(pairs_of([0, 0], **values)) == (1, 1, 0)
    contradicted = pairs_of([1, 0], **values)
    assert contradicted[0]["negatives"] == contradicted[0]["negative_ids"] == []
    assert counts_of(contradicted) == (0, 0, 1)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.booleans()), min_size=1, max_size=20), st.booleans())
def test_the_rows_of_a_query_are_grouped_as_sets_of_documents(
    log: list[tuple[str, bool]], with_ids: bool
) -> None:
    documents = [text for text, _ in log]
    ids = {"document_id": [10 * ord(text) for text in documents]} if with_ids else {}
    pairs = pairs_of([int(clicked) for _, clicked in log], document=documents, **ids)

    positives = sorted({text for text, clicked in log if clicked})
    shown = [text for text, clicked in log if not clicked]
    negatives = sorted(set(shown) - set(positives))
    contradicted = sum(text in positives for text in shown)
    assert [pair["document"] for pair in pairs] == (positives or [None])
    assert all(pair["negatives"] == negatives for pair in pairs)
    assert all(pair["negative_ids"] == [10 * ord(text) for text in negatives if with_ids] for pair in pairs)
    repeated = len(log) - len(positives) - len(negatives) - contradicted
    assert counts_of(pairs) == (int(not positives), repeated, contradicted)


@pytest.mark.parametrize("num", [3, 100, 1_000])
def test_the_pairs_of_a_query_with_many_negatives_share_them(num: int) -> None:
    documents = [f"{place:04}" for place in range(3 + num)]
    ids = [f"id {text}" for text in documents]
    pairs = pairs_of([1] * 3 + [0] * num, document=documents, document_id=ids)
    size = max(min(num, 64), -(-num // 3))
    assert [len(pair["negatives"]) for pair in pairs] == [size] * 3
    assert sorted({text for pair in pairs for text in pair["negatives"]}) == documents[3:]
    for pair in pairs:
        assert len(set(pair["negatives"])) == size
        assert pair["negative_ids"] == [entity_id(f"id {text}") for text in pair["negatives"]]


def test_the_size_of_a_popular_query_does_not_grow_with_clicked_times_unclicked_documents() -> None:
    pairs = pairs_of([1, 0] * 500, document=[f"{place}" for place in range(1_000)])
    assert sum(len(pair["negatives"]) for pair in pairs) == 500 * 64


@given(
    st.lists(
        st.tuples(st.sampled_from("qr"), st.sampled_from("abcd"), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_every_document_is_on_exactly_one_side_for_any_order_of_rows(
    log: list[tuple[str, str, int, bool]], with_ids: bool, random: Any
) -> None:
    ids = {"query_id": [7] * len(log), "document_id": [name for *_, name, _ in log]} if with_ids else {}
    rows = rows_of_log(
        [clicked for *_, clicked in log],
        query=[query for query, *_ in log],
        document=[text for _, text, *_ in log],
        **ids,
    )
    rows = with_joined_groups(rows) if with_ids else rows
    pairs = _pairs_of_groups(rows)
    again = _pairs_of_groups(rows.take(random.sample(range(len(log)), len(log))))
    assert again.equals(pairs)
    contents = [
        {name: table[name].to_pylist() for name in table.column_names[:6]} for table in (pairs, again)
    ]
    assert content_ids(contents[0]).tolist() == content_ids(contents[1]).tolist()
    if not with_ids:
        return
    found = pairs.to_pylist()
    clicked = {name for _, text, number, label in log if label for name in (text, number)}
    for pair in found:
        kept = [*zip(pair["negatives"], pair["negative_ids"], strict=True)]
        assert not clicked & {name for names in kept for name in names}
        assert len({text for text, _ in kept}) == len({name for _, name in kept}) == len(kept)
    num_kept = sum(pair["document"] is not None for pair in found) + len(found[0]["negatives"])
    assert num_kept + sum(counts_of(found)[1:]) == len(log)


def test_groups_are_counted_by_query_even_if_several_share_a_text() -> None:
    groups = [
        _pairs_of_groups(rows_of_log([0], query=["q"], document=["d"], query_id=[number]))
        for number in (1, 2)
    ]
    groups += [_pairs_of_groups(rows_of_log([1], query=["q"], document=[text])) for text in "ab"]
    names, counts = zip(*map(_skipped_in, groups), strict=True)
    assert len(set(names)) == 4
    assert [each.skipped for each in counts] == [{WITHOUT_POSITIVE: 1}, {WITHOUT_POSITIVE: 1}, {}, {}]
    assert _skipped_in(groups[0])[0] == names[0]


def test_documents_of_a_megabyte_are_checked_and_grouped_quickly() -> None:
    long = ["x" * 2**20 + str(number) for number in range(8)]
    start = time.process_time()
    pairs = pairs_of([1] * 4 + [0] * 12, query=["q" * 2**20] * 16, document=long * 2)
    decoded: list[Any] = TextFormat(tokenizer=TOKENIZER, max_length=14).decode_all(long)
    assert time.process_time() - start < 3.0  # 0.1 s, unless the code loops over letters
    assert [pair["document"] for pair in pairs] == long[:4]
    assert pairs[0]["negatives"] == long[4:]
    assert counts_of(pairs) == (0, 4, 4)
    assert all(len(each) == 14 for each in decoded)


# Texts and ids through Arrow


def read_back(format_: Format, values: Sequence[Any], cuts: Sequence[int], positions: Sequence[int]) -> Any:
    """Store valid values, and read these positions of a table split into chunks at these rows."""
    stored = store_all({"role": format_}, {"role": format_.decode_all(values)})
    numbers = pa.array(range(len(values)), pa.int64())
    table = pa.table(stored | {"sample_id": numbers, "label": numbers})
    bounds = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    parts = [table.slice(start, stop - start) for start, stop in pairwise(bounds)]
    return InMemoryDataset(parts, {"role": format_}).take(np.array(positions, np.int64)).contents["role"]


def check_tokens(found: Tokens, texts: Sequence[str]) -> None:
    expected = TOKENIZER.encode(texts, 9)
    assert found.lengths.tolist() == list(map(len, expected))
    assert found.values.tolist() == [token for tokens in expected for token in tokens]
    assert found.text_id.tolist() == [content_id(tokens.astype("<i4").tobytes()) for tokens in expected]
    for padded, row in zip(found.padded(), expected, strict=True):
        assert padded.tolist() == [*row, *[0] * (max(map(len, expected)) - len(row))]


CUTS = st.lists(st.integers(0, 12), max_size=3)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(TEXTS), max_size=4), max_size=12),
    CUTS,
    st.randoms(use_true_random=False),
)
def test_texts_and_lists_of_texts_are_read_from_tables_with_any_chunks(
    values: list[list[str]], cuts: list[int], random: Any
) -> None:
    positions = [random.randrange(len(values)) for _ in range(8)] if values else []
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9, may_be_empty=True)
    found = read_back(lists, values, cuts, positions)
    assert isinstance(found, TokenLists)
    expected = [values[position] for position in positions]
    assert found.counts.tolist() == list(map(len, expected))
    check_tokens(found.tokens, [text for row in expected for text in row])
    flat = [text for row in values for text in row]
    positions = [random.randrange(len(flat)) for _ in range(8)] if flat else []
    one_per_row = read_back(TextFormat(tokenizer=TOKENIZER, max_length=9), flat, cuts, positions)
    check_tokens(one_per_row, [flat[position] for position in positions])


@given(st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=12), CUTS)
def test_lists_of_ids_are_read_from_tables_with_any_chunks(values: list[list[int]], cuts: list[int]) -> None:
    found = read_back(IdFormat(in_lists=True), values, cuts, range(len(values))[::-1])
    assert found.tolist() == [each for row in values[::-1] for each in row]
    assert found.dtype == np.int64


def test_single_ids_are_read_from_tables_with_any_chunks() -> None:
    values = [3, "three", -1, b"three", 2**63, np.int32(3)]
    found = read_back(IdFormat(), values, [1, 1, 4], range(6))
    assert found.tolist() == [3, content_id(b"three"), -1, content_id(b"three"), -(2**63), 3]


def test_an_invalid_text_invalidates_only_its_row() -> None:
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9)
    values = [["a", None], ["b"], "c", [], None, ["d", b"\xff"], np.array(["e", "f"], object), ["", "g"], 3]
    decoded: list[Any] = lists.decode_all(values)
    causes = [str(each) if isinstance(each, InvalidValueError) else len(each) for each in decoded]
    assert causes == [
        "missing value",
        *(1, 1),
        "empty list of texts",
        *("missing value", "invalid UTF-8"),
        2,
        *("empty text", "int in place of a text"),
    ]
    expected = [each.tolist() for each in TOKENIZER.encode(["b", "e", "f"], 9)]
    assert [each.tolist() for each in (*decoded[1], *decoded[6])] == expected


def test_lists_of_negatives_may_be_empty_or_missing_but_not_invalid() -> None:
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9, may_be_empty=True)
    decoded = lists.decode_all([[], None, ["a"], [None]])
    assert [each if isinstance(each, InvalidValueError) else len(each) for each in decoded[:3]] == [0, 0, 1]
    assert isinstance(decoded[3], InvalidValueError)


@pytest.mark.parametrize(
    ("format_", "value"),
    [
        (TextFormat(tokenizer=TOKENIZER, max_length=9), "a"),
        (TextsFormat(tokenizer=TOKENIZER, max_length=9), ["a"]),
        (IdFormat(), 1),
        (IdFormat(in_lists=True), [1, 2]),
    ],
)
def test_empty_input_makes_empty_columns_of_the_same_type(format_: Format, value: Any) -> None:
    nothing, something = format_.store([]), format_.store(format_.decode_all([value]))
    assert {name: each.type for name, each in nothing.items()} == {
        name: each.type for name, each in something.items()
    }
    assert all(len(each) == 0 for each in nothing.values())


# Ids


@pytest.mark.parametrize("missing", MISSING)
def test_missing_ids_are_invalid(missing: Any) -> None:
    (one,) = IdFormat().decode_all([missing])
    ids = IdFormat(in_lists=True)
    in_a_list, none, several = ids.decode_all([[1, missing], None, np.array([1, 2])])
    assert str(one) == str(in_a_list) == "missing id"
    assert (none, several) == ([], [1, 2])
    assert ids.decode_all([7, "7", b"d7"]) == ids.decode_all(
        [[7], ["7"], [b"d7"]]
    )  # beside a single negative
    with pytest.raises(DataError, match="row 1 of a batch has no id"):
        stable_ids([4, missing])


def test_ids_that_pandas_made_floats_are_those_of_the_integers_if_they_are_exact() -> None:
    column = pa.array([7, None, 2**53 - 1], pa.int64()).to_pandas()
    first, missing, last = IdFormat().decode_all(column.to_list())
    assert [first, last] == IdFormat().decode_all([7, "9007199254740991"])
    assert str(missing) == "missing id"
    (lossy,) = IdFormat().decode_all([float(2**53)])
    assert str(lossy) == "id of 2^53 or more as float"
    assert stable_ids([7.0, 2.0**53 - 1]).tolist() == [7, 2**53 - 1]
    with pytest.raises(
        DataError, match=r"row 1 of a batch has an id of 2\^53 or more as float: give .* text"
    ):
        stable_ids([7.0, 2.0**53])  # two integers may have become this float


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_64_bit_integer_has_the_same_id_as_its_text(value: int) -> None:
    assert stable_id(value) == int(np.array(value % 2**64, np.uint64).astype(np.int64))
    (document,) = IdFormat().decode_all([value])
    assert IdFormat(in_lists=True).decode_all([[str(value), str(value).encode()]]) == [[*document, *document]]
    shown: dict[str, list[Any]] = {"document": ["a", "b"], "document_id": [value, str(value)]}
    assert counts_of(pairs_of([1, 0], **shown)) == (0, 0, 1)


def test_integers_that_numpy_converted_to_floats_keep_their_ids() -> None:
    ids = pa.array([5, None, -7], pa.int64()).to_numpy(zero_copy_only=False)  # as in Ray's batches of NumPy
    assert [stable_id(each) for each in (ids[0], ids[2])] == [5, -7]
    assert stable_id(0.5) == content_id(b"0.5")


@pytest.mark.parametrize(
    "text", ["007", "+7", "-0", "7.0", " 7", "7\n", "\u0667", "1_000", str(2**64), "9" * 300]
)
def test_a_number_written_differently_is_a_different_id(text: str) -> None:
    assert entity_id(text) == entity_id(text.encode()) == content_id(text.encode())


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.uint64(), pa.string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_a_missing_id_in_a_dataset_leaves_the_other_ids_exact(kind: pa.DataType) -> None:
    ids = [2**60 + 1, 2**60 + 2, None]
    column = (
        pa.array([each and str(each) for each in ids]).cast(kind) if is_text(kind) else pa.array(ids, kind)
    )
    batch = pa.table({"q": ["a"] * 3, "d": ["b"] * 3, "query_id": column})
    rows = RawRows.of_table(batch, PAIRS.found_in(batch.column_names, where="the test"), None)
    decoded: list[Any] = IdFormat().decode_all(rows.values["query_id"])
    assert decoded[:2] == [[2**60 + 1], [2**60 + 2]]
    assert str(decoded[2]) == "missing id"
    assert len(set(rows.sample_id.tolist())) == 3  # row hashes that include the missing id


def test_invalid_utf8_in_a_dataset_leaves_the_other_texts_valid() -> None:
    texts = pa.array([b"boats", b"caf\xe9"], pa.binary()).view(pa.string())
    rows = RawRows.of_table(pa.table({"q": texts, "d": ["a", "b"]}), PAIRS, None)
    decoded: list[Any] = TextFormat(tokenizer=TOKENIZER, max_length=9).decode_all(rows.values["query"])
    assert decoded[0].tolist() == TOKENIZER.encode(["boats"], 9)[0].tolist()
    assert str(decoded[1]) == "invalid UTF-8"


def test_a_row_needs_one_id_per_negative() -> None:
    # The totals of ids and negatives agree, so that ids could be assigned to the wrong negatives.
    decoded = {"negatives": [["a", "b"], ["c", "d"], []], "negative_ids": [[1], [2, 3, 4], []]}
    causes = [str(row_error(decoded, place)) for place in range(3)]
    assert causes == ["negatives and negative_ids differ in number"] * 2 + ["None"]
    assert row_error({"query": ["q"], "negatives": [["a"]]}, 0) is None
    invalid = InvalidValueError("empty text")
    assert row_error(decoded | {"query": [invalid, "q", "q"]}, 0) is invalid


class DatasetOfOneBatch:
    """A Ray Dataset as far as the vocabulary reads it."""

    def __init__(self, table: pa.Table) -> None:
        self._table = table

    def select_columns(self, names: list[str]) -> "DatasetOfOneBatch":
        return DatasetOfOneBatch(self._table.select(names))

    def iter_batches(self, **_: Any) -> list[pa.Table]:
        return [self._table]

    def map_batches(self, function: Callable[[pa.Table], pa.Table], **_: Any) -> "DatasetOfOneBatch":
        return DatasetOfOneBatch(function(self._table))

    def take_batch(self, size: int, **_: Any) -> pa.Table:
        return self._table.slice(0, size)

    def schema(self) -> pa.Schema:
        return self._table.schema


def test_a_missing_label_of_a_dataset_is_no_class() -> None:
    for kind in (pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())):
        label = pa.chunked_array([pa.array(["dog", None, "cat", "dog"], kind)])
        data: Any = DatasetOfOneBatch(pa.table({"label": label}))
        assert classes_of(data, ColumnNames(image="image", label="label")) == ("cat", "dog")


def test_floats_of_integers_are_labels_of_a_dataset_without_names() -> None:
    columns = ColumnNames(image=None, text="text", label="label")
    table = pa.table({"text": ["a", "b", "c"], "label": [3.0, None, math.nan]})
    assert classes_of(DatasetOfOneBatch(table), columns) is None  # type: ignore[arg-type]
    assert RawRows.of_table(table, columns, None).label.tolist() == [3, -1, -1]
    decimals = pa.table({"text": ["a", "b"], "label": pa.array([Decimal(3), None], pa.decimal128(38, 0))})
    assert classes_of(DatasetOfOneBatch(decimals), columns) is None  # type: ignore[arg-type]
    assert RawRows.of_table(decimals, columns, None).label.tolist() == [3, -1]
    for wrong in (0.5, math.inf, 2.0**53):
        data: Any = DatasetOfOneBatch(pa.table({"label": [1.0, wrong]}))
        with pytest.raises(DataError, match=f"column 'label' of the dataset holds {wrong}; name another"):
            classes_of(data, columns)
    with pytest.raises(DataError, match="labels are integers in one part of the dataset, and double or"):
        RawRows.of_table(pa.table({"text": ["a"], "label": [0.5]}), columns, None)


def test_a_vocabulary_skips_the_texts_of_a_dataset_that_are_not_utf8() -> None:
    texts = pa.array([b"one two", b"caf\xe9"], pa.binary()).view(pa.string())
    lists = pa.ListArray.from_arrays([0, 1, 2], texts)
    learned = []
    for column in (texts[:1], texts, lists):
        data: Any = DatasetOfOneBatch(pa.table({"t": column}))
        found, _ = read_vocabulary(
            recipe("simcse").text, None, ColumnNames(image=None, text="t"), [data], counted=True
        )
        learned.append(found.tokenizer.to_json())
    assert learned[1:] == learned[:1] * 2


def test_tokens_are_counted_for_encoders_that_start_from_their_frequencies() -> None:
    texts, data = recipe("simcse").text, DatasetOfOneBatch(pa.table({"t": ["one two", "two"]}))
    columns, unread = ColumnNames(image=None, text="t"), DatasetOfOneBatch(pa.table({}))
    for name, counted in (("bag_of_subwords", True), ("transformer", False), ("transformers:folder", False)):
        assert override(recipe("simcse"), {"encoder.name": name}).counts_tokens is counted
        learned, _ = learn_vocabulary(texts, None, columns, [data], counted=counted)  # pyright: ignore
        assert (learned.weights is not None) is counted
        if not counted:
            again, _ = learn_vocabulary(texts, learned.tokenizer, columns, [unread], counted=False)  # pyright: ignore
            assert again.tokenizer is learned.tokenizer
    assert not recipe("simclr").counts_tokens
    assert recipe("clip").counts_tokens
    assert not override(recipe("clip"), {"text_encoder.name": "transformer"}).counts_tokens


def test_a_corpus_adds_its_texts_to_the_vocabulary(tmp_path: Path) -> None:
    pairs, corpus = tmp_path / "pairs.parquet", tmp_path / "corpus.parquet"
    pq.write_table(pa.table({"question": ["a cat", "a dog"], "answer": ["cats purr", "dogs bark"]}), pairs)
    names = {"data.columns.query": "question", "data.columns.document": "answer"}
    config = override(recipe("two_tower"), {**names, "text.corpus": str(corpus)})
    sources = find_sources(config, [str(pairs)])
    own = ["a cat", "a dog", "cats purr", "dogs bark"]
    tokenizer = train_tokenizer(own, vocabulary_size=300)

    def frequencies() -> NDArray[np.float32]:
        found = find_corpus(config)
        assert found is not None
        columns = sources[0].columns
        read, _ = read_vocabulary(config.text, tokenizer, columns, sources, corpus=found, counted=True)
        assert read.weights is not None
        return read.weights

    others = ["a bird", "birds sing"]
    for more in (
        {"text": others},
        {"answer": others, "price": [1.0, 2.0]},  # a column of the run's pairs
        {"text": others[:1], "question": others[1:]},
        {"text": [others]},  # a list of texts with the same meaning
    ):
        pq.write_table(pa.table(more), corpus)
        texts = own + others
        holds = np.array(
            [np.isin(np.arange(tokenizer.num_tokens), row) for row in tokenizer.encode(texts, 512)]
        )
        expected = np.log((1 + len(texts)) / (1 + holds.sum(0))) + 1
        np.testing.assert_allclose(frequencies(), expected, rtol=1e-6)
    pq.write_table(pa.table({"body": others}), corpus)
    with pytest.raises(
        DataError, match="has none of the columns text, question, answer; it has body: rename its"
    ):
        find_corpus(config)
    assert find_corpus(recipe("two_tower")) is None


def test_invalid_texts_of_a_corpus_are_counted_in_a_notice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raycl.training.data_module.learn_vocabulary", read_vocabulary)
    write_rows(tmp_path / "pairs.jsonl", [{"query": "a cat", "document": "cats purr"}, {"query": "a dog"}])
    corpus = write_rows(
        tmp_path / "corpus.jsonl", [{"text": each} for each in ("a bird", None, " ", "birds")]
    )
    config = override(recipe("two_tower"), {"text.corpus": str(corpus), "data.cache": "materialize"})
    coordinator = MagicMock()
    samples = DataModule(config, coordinator, find_sources(config, [str(tmp_path / "pairs.jsonl")]))
    samples.learn_vocabulary(TOKENIZER, find_corpus(config))
    coordinator.add_notice.remote.assert_called_once_with(
        "2 of 4 texts of text.corpus are invalid and were skipped (1 empty text, 1 missing value; for example "
        "corpus.jsonl row 1 (missing value); corpus.jsonl row 2 (empty text))"
    )
    write_rows(corpus, [{"text": ["a bird", "birds"]}])
    samples.learn_vocabulary(TOKENIZER, find_corpus(config))
    assert coordinator.add_notice.remote.call_count == 1


def test_all_texts_of_a_row_count_when_a_run_decides_to_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths = {"text.max_length": 8, "text.max_document_length": 24}
    pairs, sentences = (
        override(recipe("two_tower"), lengths),
        override(recipe("simcse"), {"text.max_length": 8}),
    )
    some = pa.array([["n"] * 5, None, [], ["n"]], pa.list_(pa.string()))
    tables = {
        "negatives": (
            pairs,
            {"query": ["q"] * 4, "document": ["d"] * 4, "negatives": some},
            4 * (8 + 24) + 6 * 24,
        ),
        "lists": (sentences, {"text": [["a"], ["a", "b"], ["a"] * 3, ["c"]]}, 7 * 8),
        "texts": (sentences, {"text": list("abcd")}, 4 * 8),
    }
    for name, (config, columns, num_tokens) in tables.items():
        table = pa.table(columns)
        pq.write_table(table, tmp_path / f"{name}.parquet")
        (source,) = find_sources(config, [str(tmp_path / f"{name}.parquet")])
        dataset: Any = DatasetOfOneBatch(table)
        for rows in (source, dataset):
            for store, streams in ((2 * 4 * num_tokens, False), (2 * 4 * num_tokens - 1, True)):
                monkeypatch.setattr(
                    "raycl.training.data_module.object_store_bytes", lambda size=store: float(size)
                )
                assert must_stream(config, [(rows, source.columns, 4)]) == streams


# Columns


def test_columns_with_default_names_are_read_if_they_exist() -> None:
    usual = ["negatives", "query_id", "document_id", "negative_ids", "label", "sample_id"]
    found = PAIRS.found_in(["q", "d", "other", *usual], where="the test")
    assert found.contents == {"query": "q", "document": "d", **{name: name for name in usual[:4]}}
    assert (found.label, found.sample_id) == ("label", "sample_id")
    assert PAIRS.found_in(["q", "d"], where="the test") == PAIRS
    of_texts = ColumnNames(image=None, text="t").found_in(["t", *usual], where="the test")
    assert of_texts.contents == {"text": "t"}
    assert of_texts.label == "label"
    named = ColumnNames(image=None, query="q", document="d", negatives="hard", document_id="doc")
    found = named.found_in(["q", "d", "hard", "negatives", "doc", "document_id"], where="the test")
    assert (found.negatives, found.document_id, found.query_id) == ("hard", "doc", None)


@pytest.mark.parametrize("role", ["query", "document", "negatives", "query_id", "label", "sample_id"])
def test_a_missing_column_is_an_error_that_lists_the_existing_columns(role: str) -> None:
    asked = ColumnNames(**{"image": None, "query": "q", "document": "d", role: "gone"})
    with pytest.raises(DataError) as caught:
        asked.found_in(["q", "d", "x"], where="clicks.parquet")
    assert str(caught.value) == (
        "clicks.parquet has no column 'gone'; it has q, d, x: "
        f"name the right one with --set data.columns.{role}=NAME"
    )


STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.null()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary(4), pa.binary_view()]
INTEGERS, FLOATS = [pa.int8(), pa.uint64(), pa.int64()], [pa.float32(), pa.float64()]
LISTS = [pa.list_(pa.string()), pa.large_list(pa.binary()), pa.list_(pa.string(), 2)]
ID_LISTS = [pa.list_(pa.int64()), pa.large_list(pa.string()), pa.list_(pa.uint8(), 3), pa.null()]
NEITHER = [pa.float32(), pa.bool_(), pa.struct([("a", pa.string())]), pa.timestamp("s")]
ROLES: list[tuple[str, str, list[pa.DataType], list[pa.DataType]]] = [
    (
        "image",
        "images must be encoded bytes, structs of bytes and path, or paths",
        [*BYTES, *STRINGS, pa.struct([("bytes", pa.binary()), ("path", pa.string())])],
        [*INTEGERS, *LISTS],
    ),
    (
        "text",
        "texts must be strings, or lists of strings with the same meaning",
        [*STRINGS, *BYTES, *LISTS],
        [*INTEGERS, pa.list_(pa.int64()), pa.list_(pa.list_(pa.string()))],
    ),
    ("caption", "captions must be strings, or lists of strings", [*STRINGS, *LISTS], INTEGERS),
    ("query", "queries must be strings", [*STRINGS, *BYTES], [*INTEGERS, *LISTS]),
    ("document", "documents must be strings", [*STRINGS, *BYTES], [*INTEGERS, *LISTS]),
    (
        "negatives",
        "negatives must be lists of strings",
        [*LISTS, pa.null()],
        [*STRINGS[:4], *BYTES, *INTEGERS],
    ),
    ("query_id", "ids must be numbers or text", [*STRINGS, *INTEGERS, *FLOATS], [*BYTES, *LISTS]),
    ("document_id", "ids must be numbers or text", [*STRINGS, *INTEGERS, *FLOATS], [*BYTES, *LISTS]),
    (
        "negative_ids",
        "ids of negatives must be lists of numbers or text",
        ID_LISTS,
        [*STRINGS[:4], *INTEGERS, *FLOATS, pa.list_(pa.bool_())],
    ),
]


@pytest.mark.parametrize(("role", "what", "right", "wrong"), ROLES, ids=[role for role, *_ in ROLES])
def test_each_column_role_accepts_its_types_and_names_the_type_it_refuses(
    role: str, what: str, right: list[pa.DataType], wrong: list[pa.DataType]
) -> None:
    columns = ColumnNames(**{"image": None, role: "mine"})
    for kind in right:
        columns.check_types({"mine": kind}, where="the test")
    for kind in {*wrong, *NEITHER} - {*right}:
        with pytest.raises(DataError) as caught:
            columns.check_types({"mine": kind}, where="the test")
        assert str(caught.value) == (
            f"{what}, column 'mine' of the test holds {kind}; name another with --set data.columns.{role}=NAME"
        )


def test_labels_are_integers_texts_or_booleans() -> None:
    columns = ColumnNames(image="image", label="mine")
    of_integers = pa.dictionary(pa.int8(), pa.int64())
    for kind in [*STRINGS, *INTEGERS, *FLOATS, pa.bool_(), of_integers]:
        columns.check_types({"image": pa.binary(), "mine": kind}, where="the test")
    for kind in (pa.list_(pa.int64()), pa.binary()):
        with pytest.raises(
            DataError,
            match=re.escape(f"labels must be integers or text, column 'mine' of the test holds {kind}"),
        ):
            columns.check_types({"image": pa.binary(), "mine": kind}, where="the test")


def test_a_dataset_has_either_labels_or_lists_of_negatives() -> None:
    for one in ({"label": "clicked"}, {"negatives": "hard"}):
        check_labels(ColumnNames(image=None, query="q", document="d", **one))
    both = ColumnNames(image=None, query="q", document="d", label="clicked", negatives="hard")
    with pytest.raises(
        DataError, match=r"labels \('clicked'\) and lists of negatives \('hard'\): remove one"
    ):
        check_labels(both)


@pytest.mark.parametrize(("explicit", "is_read"), [(True, True), (2, True), (False, False)])
def test_explicit_negatives_are_read_if_they_are_used(explicit: bool | int, is_read: bool) -> None:
    names = ["query", "document", "query_id", "document_id"]
    config = override(recipe("two_tower"), {"negatives.explicit": explicit})
    usual, lists = column_names(config), ["negatives", "negative_ids"]
    found = usual.found_in([*names, *lists], where="the test")
    assert set(found.contents) == {*names, *(lists if is_read else ())}
    named = column_names(override(config, {"data.columns.negatives": "hard"}))
    assert ("negatives" in named.found_in([*names, "hard"], where="the test").contents) == is_read
    log = usual.found_in([*names, "label"], where="the test")
    assert grouped_columns(log).contents == found.contents


@pytest.mark.parametrize("query_id", [None, "user"])
@pytest.mark.parametrize("document_id", [None, "item"])
def test_grouped_rows_keep_the_ids_of_the_log(query_id: str | None, document_id: str | None) -> None:
    labeled = ColumnNames(
        image=None, query="q", document="d", label="clicked", query_id=query_id, document_id=document_id
    )
    found = grouped_columns(labeled)
    expected = {"query": "query", "document": "document", "negatives": "negatives"}
    if query_id:
        expected["query_id"] = "query_id"
    if document_id:
        expected |= {"document_id": "document_id", "negative_ids": "negative_ids"}
    assert found.contents == expected
    assert found.label is found.sample_id is None
    pairs = _pairs_of_groups(rows_of_log([1], query=["q"], document=["d"]))
    found.check_types({name: pairs.schema.field(name).type for name in expected.values()}, where="the test")
