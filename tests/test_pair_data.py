"""Pairs from columns to rows: which columns count, what of a click log can be used, what Arrow gives back."""

import re
import time
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raycl.data.click_logs import (
    CONTRADICTED,
    REPEATED,
    WITHOUT_POSITIVE,
    _checked_row,
    _left_out_of,
    _pairs_of_group,
    _valid_rows,
    check_labels,
    grouped_columns,
)
from raycl.data.codecs import Format, store_all
from raycl.data.columns import ColumnNames, is_text
from raycl.data.decode import _content_ids, _raw_rows, row_error
from raycl.data.ids import IdFormat, Ids, content_id, entity_id, stable_id, stable_ids
from raycl.data.in_memory import InMemoryDataset
from raycl.data.sources import RawRows
from raycl.data.texts import TextFormat, TextsFormat, TokenLists
from raycl.errors import BrokenValueError, DataError
from tests.pairs import clicks, rows_of, small_config, vocabulary
from tests.texts import invented_texts

TEXTS = invented_texts(40, seed=4)
TOKENIZER = vocabulary().tokenizer
MISSING = [None, float("nan"), np.float64("nan"), "", b""]

# Rows of a click log


def raw(**values: list[Any]) -> RawRows:
    """Return rows as a source reads them."""
    nothing = np.empty(0, np.int64)
    where = [f"row {place}" for place in range(len(values["query"]))]
    return RawRows(values=values, sample_id=nothing, label=nothing, where=where)


def sound(labels: Sequence[Any], **values: list[Any]) -> pa.Table:
    """Return rows of which none is broken as they are shuffled."""
    broken: Counter[str] = Counter()
    rows = _valid_rows(raw(**values), labels, broken, [])
    assert not broken
    return rows


def pairs_of(labels: Sequence[Any], **values: list[Any]) -> list[dict[str, Any]]:
    """Return what becomes of the rows of one query."""
    return _pairs_of_group(sound(labels, **values)).to_pylist()


def counts_of(pairs: list[dict[str, Any]]) -> tuple[int, ...]:
    causes = (WITHOUT_POSITIVE, REPEATED, CONTRADICTED)
    return tuple(sum(pair[f"num_{cause}"] for pair in pairs) for cause in causes)


@pytest.mark.parametrize(
    ("label", "clicked"),
    [
        *((one, True) for one in (1, True, 1.0, "1", np.int64(1), np.bool_(True), np.float32(1))),
        *((zero, False) for zero in (0, False, 0.0, "0", np.int8(0), np.bool_(False), np.float64(0))),
    ],
)
def test_a_label_of_any_type_says_whether_the_document_was_clicked(label: Any, clicked: bool) -> None:
    row = _checked_row(raw(query=["q"], document=["d"]), 0, label)
    assert row["clicked"] is clicked


@pytest.mark.parametrize("label", [2, -1, 0.5, None, float("nan"), "yes", "", "01", b"1", [1]])
def test_any_other_label_is_refused_by_name(label: Any) -> None:
    with pytest.raises(BrokenValueError, match="label other than 0 and 1"):
        _checked_row(raw(query=["q"], document=["d"]), 0, label)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        (None, "missing value"),
        (float("nan"), "missing value"),
        ("", "empty text"),
        (" \n\t", "empty text"),
        (b"caf\xe9", "invalid UTF-8"),
        ("half a pair \ud83d", "invalid UTF-8"),
        (7, "int in place of a text"),
    ],
)
@pytest.mark.parametrize("role", ["query", "document"])
def test_a_query_or_a_document_that_is_no_text_is_refused(role: str, value: Any, cause: str) -> None:
    values: dict[str, list[Any]] = {"query": ["q"], "document": ["d"], role: [value]}
    with pytest.raises(BrokenValueError, match=cause):
        _checked_row(raw(**values), 0, 1)


@pytest.mark.parametrize("role", ["query_id", "document_id"])
@pytest.mark.parametrize("missing", MISSING)
def test_a_row_without_its_id_is_refused(role: str, missing: Any) -> None:
    values: dict[str, list[Any]] = {"query": ["q"], "document": ["d"], role: [missing]}
    with pytest.raises(BrokenValueError, match="missing id"):
        _checked_row(raw(**values), 0, 1)


def test_rows_belong_together_by_the_text_of_the_query_or_by_its_id() -> None:
    by_text = sound([1, 0, 1], query=["boats", b"boats", "ships"], document=["d", "e", "f"])
    first, second, third = by_text["group"].to_pylist()
    assert first == second == content_id(b"boats")
    assert first != third
    assert by_text["query"].to_pylist() == ["boats", "boats", "ships"]
    assert by_text["clicked"].to_pylist() == [True, False, True]
    assert by_text["query_id"].null_count == by_text["document_id"].null_count == 3
    by_id = sound(
        [1, 1, 1],
        query=["boats", "boats", "ships"],
        document=["d", "e", "f"],
        query_id=[1, 2, 2],
        document_id=["x", "y", 7],
    )
    assert by_id["group"].to_pylist() == by_id["query_id"].to_pylist() == [1, 2, 2]
    assert by_id["document_id"].to_pylist() == [content_id(b"x"), content_id(b"y"), 7]


def test_no_rows_make_a_table_of_the_same_columns() -> None:
    nothing = sound([], query=[], document=[])
    assert nothing.num_rows == 0
    assert nothing.schema == sound([1], query=["q"], document=["d"]).schema


def test_broken_rows_are_counted_by_cause_with_their_places() -> None:
    broken: Counter[str] = Counter()
    examples: list[str] = []
    rows = raw(query=["q", "q", "", "q"], document=["a", None, "c", "d"])
    kept = _valid_rows(rows, [1, 0, 1, 2], broken, examples)
    assert kept["document"].to_pylist() == ["a"]
    assert broken == {"missing value": 1, "empty text": 1, "label other than 0 and 1": 1}
    assert examples == [
        "row 1 (missing value)",
        "row 2 (empty text)",
        "row 3 (label other than 0 and 1)",
    ]


# The rows of one query


def test_each_positive_becomes_a_row_with_all_that_was_not_clicked() -> None:
    pairs = pairs_of([1, 0, 1, 0], query=["q"] * 4, document=["first", "cold", "second", "dull"])
    assert [pair["document"] for pair in pairs] == ["first", "second"]
    assert all(pair["query"] == "q" and pair["negatives"] == ["cold", "dull"] for pair in pairs)
    assert all(pair["query_id"] is pair["document_id"] is None for pair in pairs)
    assert all(pair["negative_ids"] == [] for pair in pairs)
    assert counts_of(pairs) == (0, 0, 0)


def test_ids_stay_with_their_documents() -> None:
    pairs = pairs_of(
        [1, 0, 1, 0],
        query=["q", "q", "q again", "q"],
        document=["first", "cold", "second", "dull"],
        query_id=[5] * 4,
        document_id=[10, 11, 12, 13],
    )
    assert [(pair["query"], pair["document"], pair["document_id"]) for pair in pairs] == [
        ("q", "first", 10),
        ("q again", "second", 12),
    ]
    assert all((pair["query_id"], pair["negative_ids"]) == (5, [11, 13]) for pair in pairs)


def test_a_query_without_a_positive_leaves_no_pair_and_is_counted() -> None:
    pairs = pairs_of([0, 0, 0], query=["q"] * 3, document=["a", "b", "a"])
    assert [(pair["query"], pair["document"]) for pair in pairs] == [("q", None)]
    assert counts_of(pairs) == (1, 1, 0)


def test_a_repeated_pair_counts_once_and_a_contradicted_negative_not_at_all() -> None:
    # The click comes last: what was not clicked at first is no negative for that.
    pairs = pairs_of([0, 0, 1, 1, 0, 0], query=["q"] * 6, document=["a", "b", "a", "a", "b", "c"])
    assert [(pair["document"], pair["negatives"]) for pair in pairs] == [("a", ["b", "c"])]
    assert counts_of(pairs) == (0, 2, 1)


@pytest.mark.parametrize(("document", "document_id"), [("the same", 1), ("other words", 1), ("the same", 2)])
def test_a_document_is_the_same_by_its_text_or_by_its_id(document: str, document_id: int) -> None:
    values = {
        "query": ["q", "q"],
        "document": ["the same", document],
        "document_id": [1, document_id],
    }
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
    pairs = pairs_of([int(clicked) for _, clicked in log], query=["q"] * len(log), document=documents, **ids)

    positives = sorted({text for text, clicked in log if clicked})
    shown = [text for text, clicked in log if not clicked]
    negatives = sorted(set(shown) - set(positives))
    contradicted = sum(text in positives for text in shown)
    assert [pair["document"] for pair in pairs] == (positives or [None])
    assert all(pair["negatives"] == negatives for pair in pairs)
    assert all(pair["negative_ids"] == [10 * ord(text) for text in negatives if with_ids] for pair in pairs)
    repeated = len(log) - len(positives) - len(negatives) - contradicted
    assert counts_of(pairs) == (int(not positives), repeated, contradicted)


@given(
    st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 5), st.booleans()), min_size=1, max_size=15)
)
def test_whatever_the_names_no_document_is_lost_or_on_both_sides(log: list[tuple[str, int, bool]]) -> None:
    pairs = pairs_of(
        [clicked for *_, clicked in log],
        query=["q"] * len(log),
        document=[text for text, *_ in log],
        document_id=[name for _, name, _ in log],
    )
    clicked = {name for text, number, label in log if label for name in (text, number)}
    for pair in pairs:
        kept = [*zip(pair["negatives"], pair["negative_ids"], strict=True)]
        assert not clicked & {name for names in kept for name in names}
        assert len({text for text, _ in kept}) == len({name for _, name in kept}) == len(kept)
    num_kept = sum(pair["document"] is not None for pair in pairs) + len(pairs[0]["negatives"])
    assert num_kept + sum(counts_of(pairs)[1:]) == len(log)


@given(
    st.lists(
        st.tuples(st.sampled_from("qr"), st.sampled_from("abcd"), st.integers(0, 5), st.booleans()),
        min_size=1,
        max_size=12,
    ),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_the_rows_of_a_query_may_come_in_any_order(
    log: list[tuple[str, str, int, bool]], with_ids: bool, random: Any
) -> None:
    ids = {"query_id": [7] * len(log), "document_id": [name for *_, name, _ in log]} if with_ids else {}
    rows = sound(
        [clicked for *_, clicked in log],
        query=[query for query, *_ in log],
        document=[text for _, text, *_ in log],
        **ids,
    )
    pairs = _pairs_of_group(rows)
    again = _pairs_of_group(rows.take(random.sample(range(len(log)), len(log))))
    assert again.equals(pairs)
    found = [_content_ids({name: table[name].to_pylist() for name in table.column_names[:6]})
             for table in (pairs, again)]  # fmt: skip
    assert found[0].tolist() == found[1].tolist()


def test_what_was_left_out_is_noted_for_each_query_though_several_have_one_text() -> None:
    groups = [
        _pairs_of_group(sound([0], query=["q"], document=["d"], query_id=[number])) for number in (1, 2)
    ]
    groups += [_pairs_of_group(sound([1], query=["q"], document=[text])) for text in "ab"]
    names, left_out = zip(*map(_left_out_of, groups), strict=True)
    assert len(set(names)) == 4
    assert [each[WITHOUT_POSITIVE] for each in left_out] == [1, 1, 0, 0]
    assert _left_out_of(groups[0])[0] == names[0]


def test_documents_of_a_megabyte_are_checked_and_grouped_at_once() -> None:
    long = ["x" * 2**20 + str(number) for number in range(8)]
    values = {"query": ["q" * 2**20] * 16, "document": long * 2}
    start = time.process_time()
    pairs = pairs_of([1] * 4 + [0] * 12, **values)
    decoded: list[Any] = TextFormat(tokenizer=TOKENIZER, max_length=14).decode_all(long)
    assert time.process_time() - start < 3.0  # 0.1 s: more than that would be work on each letter
    assert [pair["document"] for pair in pairs] == long[:4]
    assert pairs[0]["negatives"] == long[4:]
    assert counts_of(pairs) == (0, 4, 4)
    assert all(len(each) == 14 for each in decoded)


# Texts and ids through Arrow


def read_back(format_: Format, values: Sequence[Any], cuts: Sequence[int]) -> InMemoryDataset:
    """Store sound values and read them from a table cut at these places, as Ray may hand it over."""
    stored = store_all({"role": format_}, {"role": format_.decode_all(values)})
    numbers = pa.array(range(len(values)), pa.int64())
    table = pa.table(stored | {"sample_id": numbers, "label": numbers})
    bounds = [0, *sorted(cut % (len(values) + 1) for cut in cuts), len(values)]
    return InMemoryDataset(
        [table.slice(start, stop - start) for start, stop in pairwise(bounds)], {"role": format_}
    )


@settings(deadline=None)
@given(
    st.lists(st.lists(st.sampled_from(TEXTS), max_size=4), max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
    st.randoms(use_true_random=False),
)
def test_lists_of_texts_come_back_from_tables_however_they_are_cut(
    values: list[list[str]], cuts: list[int], random: Any
) -> None:
    positions = [random.randrange(len(values)) for _ in range(8)] if values else []
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9, may_be_empty=True)
    found = read_back(lists, values, cuts).take(np.array(positions, np.int64)).contents["role"]
    assert isinstance(found, TokenLists)
    wanted = [values[position] for position in positions]
    assert found.counts.tolist() == list(map(len, wanted))
    expected = TOKENIZER.encode([text for row in wanted for text in row], 9)
    assert found.tokens.lengths.tolist() == list(map(len, expected))
    assert found.tokens.values.tolist() == [token for tokens in expected for token in tokens]
    ids = found.tokens.text_id
    assert ids.tolist() == [content_id(tokens.astype("<i4").tobytes()) for tokens in expected]


@given(
    st.lists(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=4), max_size=12),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_lists_of_ids_come_back_from_tables_however_they_are_cut(
    values: list[list[int]], cuts: list[int]
) -> None:
    found = (
        read_back(IdFormat(in_lists=True), values, cuts).take(np.arange(len(values))[::-1]).contents["role"]
    )
    assert isinstance(found, Ids)
    assert found.counts.tolist() == [len(row) for row in values[::-1]]
    assert found.values.tolist() == [each for row in values[::-1] for each in row]
    assert found.values.dtype == np.int64


def test_one_id_a_row_comes_back_from_tables_however_they_are_cut() -> None:
    values = [3, "three", -1, b"three", 2**63, np.int32(3)]
    found = read_back(IdFormat(), values, [1, 1, 4]).take(np.arange(6)).contents["role"]
    assert isinstance(found, Ids)
    assert found.values.tolist() == [3, content_id(b"three"), -1, content_id(b"three"), -(2**63), 3]
    assert found.counts.tolist() == [1] * 6
    assert len(found) == 6


def test_batches_of_texts_and_ids_are_joined_row_after_row() -> None:
    config = small_config()
    rows = rows_of(config, clicks(9, num_negatives=[2, 0, 3]))
    joined, at_once = (
        rows.take(np.array([5, 1])).joined(rows.take(np.array([8]))),
        rows.take(np.array([5, 1, 8])),
    )
    for role, content in at_once.contents.items():
        other = joined.contents[role]
        assert len(other) == len(content) == 3
        parts = (
            vars(each.tokens) | {"counts": each.counts} if isinstance(each, TokenLists) else vars(each)
            for each in (content, other)
        )
        ours, theirs = parts
        for name, values in ours.items():
            assert np.array_equal(values, theirs[name]), (role, name)


def test_one_broken_text_is_enough_to_refuse_a_list_and_the_others_keep_their_places() -> None:
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9)
    values = [["a", None], ["b"], "c", [], None, ["d", b"\xff"], np.array(["e", "f"], object), ["", "g"]]
    decoded: list[Any] = lists.decode_all(values)
    causes = [str(each) if isinstance(each, BrokenValueError) else len(each) for each in decoded]
    assert causes == [
        "missing value",
        1,
        1,
        "empty list of texts",
        "missing value",
        "invalid UTF-8",
        2,
        "empty text",
    ]
    assert decoded[1][0].tolist() == TOKENIZER.encode(["b"], 9)[0].tolist()
    assert [each.tolist() for each in decoded[6]] == [
        each.tolist() for each in TOKENIZER.encode(["e", "f"], 9)
    ]


def test_lists_of_negatives_may_be_empty_or_missing_but_not_broken() -> None:
    lists = TextsFormat(tokenizer=TOKENIZER, max_length=9, may_be_empty=True)
    decoded = lists.decode_all([[], None, ["a"], [None]])
    assert [each if isinstance(each, BrokenValueError) else len(each) for each in decoded[:3]] == [0, 0, 1]
    assert isinstance(decoded[3], BrokenValueError)


def test_no_values_make_empty_columns_of_the_same_type() -> None:
    formats: list[tuple[Format, Any]] = [
        (TextsFormat(tokenizer=TOKENIZER, max_length=9), ["a"]),
        (IdFormat(), 1),
        (IdFormat(in_lists=True), [1, 2]),
    ]
    for format_, value in formats:
        nothing, something = format_.store([]), format_.store(format_.decode_all([value]))
        assert {name: each.type for name, each in nothing.items()} == {
            name: each.type for name, each in something.items()
        }
        assert all(len(each) == 0 for each in nothing.values())


@pytest.mark.parametrize("missing", MISSING)
def test_a_missing_id_is_told_apart(missing: Any) -> None:
    (one,) = IdFormat().decode_all([missing])
    in_a_list, none, several = IdFormat(in_lists=True).decode_all([[1, missing], None, np.array([1, 2])])
    assert str(one) == str(in_a_list) == "missing id"
    assert (none, several) == ([], [1, 2])
    with pytest.raises(DataError, match="row 1 of a batch has no id"):
        stable_ids([4, missing])


def test_ids_that_became_floats_beside_a_missing_one_stay_what_they_were() -> None:
    # Integers with a null among them come out of Ray's batches of NumPy as floats.
    ids = pa.array([5, None, -7], pa.int64()).to_numpy(zero_copy_only=False)
    assert [stable_id(each) for each in (ids[0], ids[2])] == [5, -7]
    assert stable_id(0.5) == content_id(b"0.5")


@given(st.integers(-(2**63), 2**64 - 1))
def test_an_integer_is_its_own_id_up_to_64_bits(value: int) -> None:
    assert stable_id(value) == int(np.array(value % 2**64, np.uint64).astype(np.int64))


@given(st.integers(-(2**63), 2**64 - 1))
def test_a_document_and_a_negative_are_one_thing_though_one_has_its_number_as_text(value: int) -> None:
    (document,) = IdFormat().decode_all([value])
    assert IdFormat(in_lists=True).decode_all([[str(value), str(value).encode()]]) == [[*document, *document]]
    shown = {"document": ["a", "b"], "document_id": [value, str(value)]}
    assert counts_of(pairs_of([1, 0], query=["q", "q"], **shown)) == (0, 0, 1)


@pytest.mark.parametrize(
    "text", ["007", "+7", "-0", "7.0", " 7", "7\n", "\u0667", "1_000", str(2**64), "9" * 300]
)
def test_what_is_written_otherwise_is_another_name(text: str) -> None:
    assert entity_id(text) == entity_id(text.encode()) == content_id(text.encode())


@pytest.mark.parametrize(
    "kind", [pa.int64(), pa.uint64(), pa.string(), pa.dictionary(pa.int8(), pa.string())]
)
def test_ids_of_a_dataset_beside_a_missing_one_stay_what_they_are(kind: pa.DataType) -> None:
    ids = [2**60 + 1, 2**60 + 2, None]
    column = (
        pa.array([each and str(each) for each in ids]).cast(kind) if is_text(kind) else pa.array(ids, kind)
    )
    batch = pa.table({"q": ["a"] * 3, "d": ["b"] * 3, "query_id": column})
    rows = _raw_rows(batch, PAIRS.found_in(batch.column_names, where="the test"))
    decoded: list[Any] = IdFormat().decode_all(rows.values["query_id"])
    assert decoded[:2] == [[2**60 + 1], [2**60 + 2]]
    assert str(decoded[2]) == "missing id"
    assert len(set(rows.sample_id.tolist())) == 3  # hashes of the rows, the missing id included


def test_a_text_of_a_dataset_that_is_no_utf8_does_not_spoil_the_others() -> None:
    texts = pa.array([b"boats", b"caf\xe9"], pa.binary()).view(pa.string())
    batch = pa.table({"q": texts, "d": ["a", "b"]})
    decoded: list[Any] = TextFormat(tokenizer=TOKENIZER, max_length=9).decode_all(
        _raw_rows(batch, PAIRS).values["query"]
    )
    assert decoded[0].tolist() == TOKENIZER.encode(["boats"], 9)[0].tolist()
    assert str(decoded[1]) == "invalid UTF-8"


def test_a_row_whose_negatives_have_ids_for_others_is_broken() -> None:
    # As many ids as negatives in all, so that they would pass for each other's.
    decoded = {"negatives": [["a", "b"], ["c", "d"], []], "negative_ids": [[1], [2, 3, 4], []]}
    causes = [str(row_error(decoded, place)) for place in range(3)]
    assert causes == ["negatives and negative_ids differ in number"] * 2 + ["None"]
    assert row_error({"query": ["q"], "negatives": [["a"]]}, 0) is None
    broken = BrokenValueError("empty text")
    assert row_error(decoded | {"query": [broken, "q", "q"]}, 0) is broken


# Columns

PAIRS = ColumnNames(image=None, query="q", document="d")


def test_of_pairs_the_usual_columns_are_read_where_they_are_there() -> None:
    usual = ["negatives", "query_id", "document_id", "negative_ids", "label", "sample_id"]
    found = PAIRS.found_in(["q", "d", "other", *usual], where="the test")
    assert found.contents == {"query": "q", "document": "d", **{name: name for name in usual[:4]}}
    assert (found.label, found.sample_id) == ("label", "sample_id")
    assert PAIRS.found_in(["q", "d"], where="the test") == PAIRS
    of_texts = ColumnNames(image=None, text="t").found_in(["t", *usual], where="the test")
    assert of_texts.contents == {"text": "t"}
    assert of_texts.label == "label"


def test_a_column_of_another_name_is_read_in_its_place() -> None:
    named = ColumnNames(image=None, query="q", document="d", negatives="hard", document_id="doc")
    found = named.found_in(["q", "d", "hard", "negatives", "doc", "document_id"], where="the test")
    assert (found.negatives, found.document_id, found.query_id) == ("hard", "doc", None)


@pytest.mark.parametrize("role", ["query", "document", "negatives", "query_id", "label", "sample_id"])
def test_a_column_that_was_asked_for_and_is_not_there_is_named_with_those_that_are(role: str) -> None:
    asked = ColumnNames(**{"image": None, "query": "q", "document": "d", role: "gone"})
    with pytest.raises(DataError) as caught:
        asked.found_in(["q", "d", "x"], where="clicks.parquet")
    assert str(caught.value) == (
        "clicks.parquet has no column 'gone'; it has q, d, x: "
        f"name the right one with --set data.columns.{role}=NAME"
    )


STRINGS = [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string()), pa.null()]
BYTES = [pa.binary(), pa.large_binary(), pa.binary(4)]
INTEGERS = [pa.int8(), pa.uint64(), pa.int64()]
LISTS = [pa.list_(pa.string()), pa.large_list(pa.binary()), pa.list_(pa.string(), 2)]
ID_LISTS = [pa.list_(pa.int64()), pa.large_list(pa.string()), pa.list_(pa.uint8(), 3), pa.null()]
NEITHER = [pa.float32(), pa.bool_(), pa.struct([("a", pa.string())]), pa.timestamp("s")]
ROLES: list[tuple[str, str, list[pa.DataType], list[pa.DataType]]] = [
    (
        "image",
        "images must be encoded bytes, or structs of bytes and path",
        [*BYTES, pa.null(), pa.struct([("bytes", pa.binary()), ("path", pa.string())])],
        [pa.string(), *INTEGERS, *LISTS],
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
    ("query_id", "ids must be integers or text", [*STRINGS, *INTEGERS], [*BYTES, *LISTS]),
    ("document_id", "ids must be integers or text", [*STRINGS, *INTEGERS], [*BYTES, *LISTS]),
    (
        "negative_ids",
        "ids of negatives must be lists of integers or text",
        ID_LISTS,
        [*STRINGS[:4], *INTEGERS, pa.list_(pa.float32())],
    ),
]


@pytest.mark.parametrize(("role", "what", "right", "wrong"), ROLES, ids=[role for role, *_ in ROLES])
def test_each_role_takes_its_types_and_names_any_other(
    role: str, what: str, right: list[pa.DataType], wrong: list[pa.DataType]
) -> None:
    columns = ColumnNames(**{"image": None, role: "mine"})
    for kind in right:
        columns.check_types({"mine": kind}, where="the test")
    for kind in [*wrong, *NEITHER]:
        with pytest.raises(DataError) as caught:
            columns.check_types({"mine": kind}, where="the test")
        assert str(caught.value) == (
            f"{what}, column 'mine' of the test holds {kind}; name another with --set data.columns.{role}=NAME"
        )


def test_labels_are_integers_text_or_yes_and_no() -> None:
    columns = ColumnNames(image="image", label="mine")
    of_integers = pa.dictionary(pa.int8(), pa.int64())
    for kind in [*STRINGS, *INTEGERS, pa.bool_(), of_integers]:
        columns.check_types({"image": pa.binary(), "mine": kind}, where="the test")
    for kind in (pa.float64(), pa.list_(pa.int64()), pa.binary()):
        with pytest.raises(
            DataError,
            match=re.escape(f"labels must be integers or text, column 'mine' of the test holds {kind}"),
        ):
            columns.check_types({"image": pa.binary(), "mine": kind}, where="the test")


def test_a_set_has_labels_or_lists_of_negatives() -> None:
    labeled = ColumnNames(image=None, query="q", document="d", label="clicked")
    check_labels(labeled)
    check_labels(ColumnNames(image=None, query="q", document="d", negatives="hard"))
    both = ColumnNames(image=None, query="q", document="d", label="clicked", negatives="hard")
    with pytest.raises(
        DataError, match=r"labels \('clicked'\) and lists of negatives \('hard'\): remove one"
    ):
        check_labels(both)


@pytest.mark.parametrize("query_id", [None, "user"])
@pytest.mark.parametrize("document_id", [None, "item"])
def test_grouped_rows_have_the_ids_that_there_were(query_id: str | None, document_id: str | None) -> None:
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
    pairs = _pairs_of_group(sound([1], query=["q"], document=["d"]))
    found.check_types({name: pairs.schema.field(name).type for name in expected.values()}, where="the test")
