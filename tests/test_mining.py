"""What is judged and mined: which rows count, and which documents are no negatives of a query."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from raycl.data.columns import ColumnNames
from raycl.errors import ConfigError
from raycl.inference.mining import _Pairs
from raycl.inference.retrieval import evaluate_retrieval
from raycl.inference.values import Values, read_values

PAIRS = ColumnNames(image=None, query="query", document="document")


def test_rows_without_text_or_label_are_left_out_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "pairs.parquet"
    rows = {"query": ["a", "b", " ", "d"], "document": ["x", "y", "z", "x"], "label": [1, None, 1, 0]}
    pq.write_table(pa.table(rows), path)
    found = read_values(str(path), PAIRS)
    assert found.by_role["query"] == ["a", "d"]
    assert (found.label.tolist(), found.num_broken) == ([1, 0], 2)


def test_no_match_of_a_query_is_its_negative_whatever_a_log_says() -> None:
    by_role = {"query": ["q", "q", "q", "q"], "document": ["good", "fine", "good", "bad"]}
    pairs = _Pairs(Values(by_role=by_role, label=np.array([1, 1, 0, 0])))
    nearest = np.array([[2]])
    table, mined = pairs.with_mined((np.array([[0.1]]), nearest), np.array([0.9, 0.9]), 3, 0.95)
    assert table["document"].to_pylist() == ["good", "fine"]
    # The contradicted one is a negative of neither row; what was explicit already is not added again.
    assert table["negatives"].to_pylist() == [["bad"], ["bad"]]
    assert (mined.num_pairs, mined.num_negatives) == (2, 0)


def test_what_is_nearer_than_a_part_of_the_positive_is_left_out_and_counted() -> None:
    by_role = {"query": ["q", "r", "s"], "document": ["a", "b", "c"]}
    pairs = _Pairs(Values(by_role=by_role, label=np.full(3, -1)))
    similarity, place = np.array([[0.9, 0.7]] * 3), np.array([[1, 2], [0, 2], [0, 1]])
    table, mined = pairs.with_mined((similarity, place), np.full(3, 0.8), 3, 0.95)
    assert table["negatives"].to_pylist() == [["c"], ["c"], ["b"]]
    assert (mined.num_negatives, mined.num_too_near) == (3, 3)


def test_judgments_without_their_documents_are_refused() -> None:
    with pytest.raises(ConfigError, match="documents is missing: give --set documents=URI"):
        evaluate_retrieval(run="run", test="judgments", queries="queries")
