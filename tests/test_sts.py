"""Spearman's correlation of sentence similarity with human scores."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from numpy.typing import NDArray

import raycl
from raycl.errors import DataError
from raycl.evaluation import sts
from raycl.evaluation.lexical_baselines import tfidf_similarity
from raycl.evaluation.metrics import spearman, sts_scores
from raycl.evaluation.sts import evaluate_sts
from tests.pairs import small_config
from tests.test_saved_text import save


def plain_ranks(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the ranks of values; equal values share their mean rank."""
    below = (values[None] < values[:, None]).sum(axis=1)
    equal = (values[None] == values[:, None]).sum(axis=1)
    return below + (equal + 1) / 2


def draw(num_pairs: int, seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Similarities and loosely correlated scores in steps of one half, with many ties."""
    rng = np.random.default_rng(seed)
    similarity = rng.normal(size=num_pairs)
    return similarity, np.round(2 * similarity + rng.normal(size=num_pairs)) / 2


@pytest.mark.parametrize("seed", range(4))
def test_spearman_is_the_correlation_of_ranks_with_shared_ranks_for_ties(seed: int) -> None:
    similarity, score = draw(60, seed)
    expected = np.corrcoef(plain_ranks(similarity), plain_ranks(score))[0, 1]
    assert spearman(similarity, score) == pytest.approx(expected, abs=1e-12)
    assert 0.3 < expected < 0.99


def test_each_data_set_is_scored_alone_and_the_mean_is_over_data_sets() -> None:
    similarity, score = draw(100, 1)
    dataset = ["sts12" if number % 3 else "alpha" for number in range(100)]
    dataset[0] = "sts12"  # the first in the file, not in the alphabet
    result = sts_scores(similarity, score, dataset)
    own = {name: np.array([each == name for each in dataset]) for name in ("sts12", "alpha")}
    expected = {name: spearman(similarity[rows], score[rows]) for name, rows in own.items()}
    assert list(result["spearman"].items()) == list(expected.items())
    assert result["mean"] == pytest.approx(sum(expected.values()) / 2)
    assert result["mean"] != pytest.approx(spearman(similarity, score), abs=1e-3)


def test_all_pairs_of_a_data_set_are_scored_at_once() -> None:
    # Two subsets in perfect order, with different score scales.
    similarity = np.array([0.1, 0.2, 0.3, 0.7, 0.8, 0.9])
    score = np.array([3, 4, 5, 0, 1, 2])
    assert sts_scores(similarity, score, ["sts12"] * 6)["mean"] < 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"similarity": np.ones(3)}, "the 3 similarities of sickr do not differ, .* that have collapsed"),
        ({"score": np.ones(3)}, "the 3 scores of sickr do not differ, .*; give scores that differ"),
        ({"similarity": np.array([0.1, np.nan, 0.2])}, "similarities of sickr are not all finite"),
        ({"score": np.array([0.1, np.inf, 0.2])}, "scores of sickr are not all finite"),
        ({"dataset": ["sickr", "stsb", "sickr"]}, "stsb has fewer than two pairs"),
    ],
)
def test_invalid_pairs_are_named(arguments: dict[str, Any], words: str) -> None:
    good: dict[str, Any] = {"similarity": np.arange(3.0), "score": np.arange(3.0), "dataset": ["sickr"] * 3}
    with pytest.raises(DataError, match=words) as caught:
        sts_scores(**(good | arguments))
    assert ";" in str(caught.value)  # with the remedy


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"sentence1": ["a", "b", ""]}, "row 2 of .*test has a sentence1 that cannot be used: empty text"),
        (
            {"sentence2": ["a", None, "c"]},
            "row 1 of .*test has a sentence2 that cannot be used: missing value",
        ),
        ({"sentence2": ["a", b"caf\xe9", "c"]}, "row 1 of .*test has a sentence2 .*: invalid UTF-8"),
        (
            {"score": ["5", "low", "high"]},
            r"row 1 of .*test has the score 'low', which is not a finite number \(2 of 3 rows have none\)",
        ),
        (
            {"score": [1.0, None, 2.0]},
            r"row 1 of .*test has the score None, which is not a finite number \(1 of 3 rows have none\)",
        ),
        ({"score": [1.0, 2.0, np.inf]}, "row 2 of .*test has the score inf"),
        ({"score": [2, 2, 2]}, "the 3 scores of sts do not differ"),
        ({"dataset": ["x", "x", "y"]}, "y has fewer than two pairs, .* leave that data set out"),
        ({"score": [[1], [2], [3]]}, r"row 0 of .*test has the score \[1\], .* \(3 of 3 rows"),
        ({name: [] for name in ("sentence1", "sentence2", "score")}, "test holds no rows"),
    ],
)
def test_invalid_sentences_and_scores_are_refused_before_embedding(
    columns: dict[str, Any], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(sts, "embed_values")
    save(small_config("simcse"), tmp_path / "run")
    good = {"sentence1": ["a", "b", "c"], "sentence2": ["d", "e", "f"], "score": [1, 2, 3]}
    table = {name: arrow(values) for name, values in (good | columns).items()}
    pq.write_table(pa.table(table), tmp_path / "test")
    with pytest.raises(DataError, match=words) as caught:
        evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"))
    assert ";" in str(caught.value)  # with the remedy


@pytest.mark.parametrize(
    ("columns", "remedy"),
    [
        ({"sentence": ["a"]}, "--set text=NAME"),
        ({"Text": ["a"]}, "--set text=Text"),
        ({" text": ["a"]}, "--set 'text=\" text\"'"),
        ({"text": [1]}, "--set text=NAME"),
        ({"text": [None]}, "--set text"),
    ],
)
def test_a_corpus_without_texts_is_refused_with_the_setting_of_the_measure(
    columns: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "score": [1, 2]}
    pq.write_table(pa.table(pairs), tmp_path / "test")
    pq.write_table(pa.table(columns), tmp_path / "corpus")
    with pytest.raises(DataError) as caught:
        evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), train=str(tmp_path / "corpus"))
    assert str(caught.value).endswith(remedy)


def arrow(values: list[Any]) -> pa.Array:
    """Return a column; bytes are stored as strings, which Arrow does not check."""
    if not any(isinstance(value, bytes) for value in values):
        return pa.array(values)
    content = pa.array([value.encode() if isinstance(value, str) else value for value in values], pa.binary())
    return pa.Array.from_buffers(pa.string(), len(content), content.buffers())


def test_a_corpus_without_a_valid_text_is_refused_before_embedding(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a", "b"], "sentence2": ["c", "d"], "score": [1, 2]}
    pq.write_table(pa.table(pairs), tmp_path / "test")
    pq.write_table(pa.table({"text": ["", None]}), tmp_path / "corpus")
    with pytest.raises(DataError, match="none of the 2 rows of .*corpus can be used"):
        evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), train=str(tmp_path / "corpus"))


def test_labels_of_the_corpus_are_not_read(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a b", "b c", "c"], "sentence2": ["a", "b c", "d"], "score": [2, 3, 1]}
    pq.write_table(pa.table(pairs), tmp_path / "test")
    pq.write_table(pa.table({"text": ["a c", "b d"], "label": ["cat", "dog"]}), tmp_path / "corpus")
    sets = {name: str(tmp_path / name) for name in ("run", "test")}
    assert evaluate_sts(**sets, train=str(tmp_path / "corpus"), quiet=True)["num_train"] == 2


def test_pairs_of_equal_sentences_share_a_rank(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path / "run")
    texts = [" ".join(f"w{number}" for number in range(start, 2 * start + 3)) for start in range(40)]
    left, right, score = [*texts, *texts], [*texts, *texts[1:], "a"], [*range(40), *range(40)]
    pq.write_table(pa.table({"sentence1": left, "sentence2": right, "score": score}), tmp_path / "test")
    found = evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), quiet=True)
    rows = raycl.load_encoder(tmp_path / "run").encode([*left, *right]).double().numpy()
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    similarity = (rows[:80] * rows[80:]).sum(1).round(6)
    similarity[:40] = 1  # without rounding errors
    assert found["spearman"]["sts"] == pytest.approx(spearman(similarity, np.array(score)), abs=1e-9)
    shared = tfidf_similarity(left, right, [*left, *right])
    shared[:40] = 1
    baseline = found["baseline"]["tfidf"]["spearman"]["sts"]
    assert baseline == pytest.approx(spearman(shared, np.array(score)), abs=1e-9)


def test_names_of_data_sets_may_be_numbers_in_one_file_and_texts_in_another(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a b", "b c", "c"], "sentence2": ["a", "b c", "d"], "score": [2, 3, 1]}
    (tmp_path / "test").mkdir()
    for name, dataset in {"a": [12] * 3, "b": ["news"] * 3}.items():
        pq.write_table(pa.table({**pairs, "dataset": dataset}), tmp_path / "test" / f"{name}.parquet")
    found = evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), quiet=True)
    assert list(found["spearman"]) == [12, "news"]


@pytest.mark.parametrize(
    ("dataset", "names"), [([float("nan")] * 3, ["nan"]), ([["a"]] * 3, ["['a']"]), ([None] * 3, [None])]
)
def test_names_of_data_sets_may_be_missing_or_lists(
    dataset: list[Any], names: list[str | None], tmp_path: Path
) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a b", "b c", "c"], "sentence2": ["a", "b c", "d"], "score": [2, 3, 1]}
    pq.write_table(pa.table({**pairs, "dataset": dataset}), tmp_path / "test.parquet")
    found = evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test.parquet"), quiet=True)
    assert list(found["spearman"]) == names


def test_a_baseline_without_shared_words_is_unknown(tmp_path: Path) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {
        "sentence1": ["one", "two", "three", "cat", "a dog", "bird"],
        "sentence2": ["eins", "zwei", "drei", "cat", "dog", "fish"],
        "score": [1, 2, 3, 3, 2, 1],
        "dataset": ["german"] * 3 + ["english"] * 3,
    }
    pq.write_table(pa.table(pairs), tmp_path / "test")
    found = evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), quiet=True)
    assert found["mean"] == pytest.approx(sum(found["spearman"].values()) / 2)
    baseline = found["baseline"]["tfidf"]
    assert baseline == {"spearman": {"german": None, "english": pytest.approx(1)}, "mean": None}
    assert "mean" in str(found)


def test_sentences_without_words_are_evaluated_without_a_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["+", "-", "="], "sentence2": ["+", "*", "/"], "score": [3, 2, 1]}
    pq.write_table(pa.table(pairs), tmp_path / "test")
    found = evaluate_sts(run=str(tmp_path / "run"), test=str(tmp_path / "test"), quiet=True)
    assert "mean" in found and "baseline" not in found
    assert "raycl: no baseline of words: the pairs have no words" in capsys.readouterr().err


def test_the_files_that_are_not_read_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(small_config("simcse"), tmp_path / "run")
    pairs = {"sentence1": ["a b", "b c"], "sentence2": ["a", "b c"], "score": [2, 3], "split": ["dev"] * 2}
    for name, rows in {"test": pairs, "corpus": {"text": ["a c", "b d"]}}.items():
        (tmp_path / name).mkdir()
        pq.write_table(pa.table(rows), tmp_path / name / "rows.parquet")
        (tmp_path / name / "notes.md").touch()
    run, test, train = (str(tmp_path / name) for name in ("run", "test", "corpus"))
    evaluate_sts(run=run, test=test, train=train, quiet=True)
    assert "not read" not in capsys.readouterr().err
    evaluate_sts(run=run, test=test, train=train)
    lines = capsys.readouterr().err.splitlines()
    assert [each for each in lines if "not read" in each] == [
        f"files not read in {uri}: 1 .md" for uri in (test, train)
    ]
