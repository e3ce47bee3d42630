"""Value tables in notebooks and terminals, and value formats."""

import json
import math
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest

from raycl.config import RunConfig, Stage
from raycl.config.overrides import override
from raycl.display import (
    Displayable,
    EvaluationResult,
    Table,
    flatten,
    format_bytes,
    format_value,
    progress_html,
    text_table,
)
from raycl.errors import first_line, last_line
from raycl.negatives.search import Neighbors
from raycl.negatives.stats import BankStats, ShardStats
from raycl.recipes import RECIPES, recipe

EVIL = "<script>alert(1)</script>&\"'"


class Tags(HTMLParser):
    """Record tags and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text: list[str] = []
        self.cells: list[list[str]] = []
        self.feed(html)
        assert not self.open, f"{self.open} stay open"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.seen.add(tag)
        if tag == "tr":
            self.cells.append([])

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self.open[-1] in ("td", "th"):
            self.cells[-1].append(data)


def stats(**changes: Any) -> BankStats:
    shard = ShardStats(node_id="n" * 20, node_ip="10.0.0.1", pid=7, rows=65_536, num_bytes=2**25, restarts=1)
    values: dict[str, Any] = {
        "name": "first", "kind": "queue", "output": "runs/first", "rows": 65_536, "filled": 4_096, "dim": 128,
        "dtype": "float16", "num_bytes": 2**25, "shards": (shard,), "newest_step": 1_234, "age_mean": 7.5,
        "age_max": 15, "age_histogram": ((1, 256),), "norm_mean": 1.0, "norm_min": 0.5, "norm_max": 1.5, "puts": 1_000_000,
        "reads": 0, "puts_per_second": 12.25, "reads_per_second": 0.0, "restarts": 1,
    }  # fmt: skip
    return BankStats(**values | changes)


NEIGHBORS = Neighbors(
    sample_id=np.array([7, 123_456]),
    similarity=np.array([0.5, 0.25], np.float32),
    step=np.array([3, 1_000]),
    newest_step=1_234,
)
SCORES = EvaluationResult(
    {"measure": "retrieval", "recall_at_10": 0.5, "num_test": 12_345, "hybrid": {"recall_at_10": 0.75},
     "baseline": {"tfidf": {"recall_at_10": 0.25}}, "examples": [{"query": EVIL}] * 3}
)  # fmt: skip
VALUES: dict[str, Displayable] = {
    "bank": stats(),
    "an empty bank": stats(newest_step=None, age_mean=None, age_max=None, norm_mean=None, shards=()),
    "neighbors": NEIGHBORS,
    "scores": SCORES,
    "configuration": recipe("moco_v2", image_size=32),
    "stage": Stage(epochs=3),
    "default section": recipe("simclr").monitor,
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_value_is_rendered_completely_as_valid_html_and_as_text(value: Displayable) -> None:
    table, html, text = value.to_table(), value._repr_html_(), str(value)
    cells = Tags(html).cells
    assert [[name, format_value(fact)] for name, fact in table.facts.items()] == cells[: len(table.facts)]
    if table.rows:
        assert [list(map(format_value, row)) for row in table.rows] == cells[len(table.facts) + 1 :]
    for line in [*cells, [table.title]]:
        assert all(cell in text for cell in line)


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_the_html_sets_no_colors(value: Displayable) -> None:
    html = value._repr_html_() + progress_html("training", 1, 2, "")
    assert "color" not in html and "background" not in html and "<style" not in html


def test_untrusted_text_is_escaped() -> None:
    table = Table(title=EVIL, facts={EVIL: EVIL}, columns=(EVIL,), rows=[(EVIL,)])
    for html in (table.to_html(), progress_html(EVIL, 1, 2, EVIL), EvaluationResult({"measure": EVIL, EVIL: EVIL})._repr_html_()):  # fmt: skip
        tags = Tags(html)
        assert "script" not in tags.seen
        assert any(EVIL in text for text in tags.text)


def test_the_repr_of_a_value_shows_its_fields() -> None:
    assert repr(stats()).startswith("BankStats(name='first', kind='queue'")
    assert repr(EvaluationResult({"top1": 0.5})) == "{'top1': 0.5}"
    assert repr(Stage(epochs=3)).startswith("Stage(epochs=3")


def test_ipython_prints_the_lines_in_a_terminal() -> None:
    class Printer:
        def text(self, text: str) -> None:
            self.printed = text

    printer = Printer()
    SCORES._repr_pretty_(printer, cycle=False)
    assert printer.printed == str(SCORES)


def test_scores_are_a_json_serializable_dictionary() -> None:
    assert json.loads(json.dumps(SCORES)) == dict(SCORES)
    assert SCORES["baseline"]["tfidf"]["recall_at_10"] == 0.25


def test_scores_stand_beside_their_baselines_and_examples_are_counted() -> None:
    table = SCORES.to_table()
    assert table.title == "retrieval"
    assert table.facts == {"num_test": 12_345, "examples": "3 of them"}
    assert (table.columns, table.rows) == (
        ("metric", "encoder", "hybrid", "tfidf"),
        [("recall_at_10", 0.5, 0.75, 0.25)],
    )


def test_a_baseline_of_one_number_and_scores_by_data_set_are_shown() -> None:
    knn = EvaluationResult(
        {"measure": "knn", "top1": 0.5, "num_test": 3, "baseline": {"pixels": 0.25, "num_train": 9}}
    )
    assert knn.to_table().columns == ("metric", "encoder", "pixels")
    assert knn.to_table().rows == [("top1", 0.5, 0.25)]
    assert knn.to_table().facts == {"num_test": 3, "baseline.num_train": 9}
    scores = {"spearman": {"stsb": 0.5}, "mean": 0.5}
    sts = EvaluationResult(
        {"measure": "sts", **scores, "baseline": {"tfidf": {"spearman": {"sick": 0.1}, "mean": 0.1}}}
    )
    assert sts.to_table().rows == [("spearman.stsb", 0.5, None), ("mean", 0.5, 0.1)]


def test_neighbor_ids_and_steps_are_shown_without_separators() -> None:
    assert NEIGHBORS.to_table().rows[1] == ("123456", "0.2500", "1000")


@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("image_size", [32, 224])
def test_the_displayed_settings_reproduce_the_configuration(name: str, image_size: int) -> None:
    config = recipe(name, image_size=image_size)
    facts = dict(config.to_table().facts)
    blank = RunConfig(recipe=name, stages=(Stage(epochs=1),))
    assert override(blank, {"stages.0.epochs": config.stages[0].epochs} | facts) == config
    assert len(facts) < len(flatten(config.model_dump())) / 2


def test_flatten_keeps_lists_of_values_and_expands_lists_of_mappings() -> None:
    assert flatten({"a": {"b": [1, 2]}, "c": [{"d": 1}, {"d": 2}], "e": {}}) == {"a.b": [1, 2], "c.0.d": 1, "c.1.d": 2, "e": {}}  # fmt: skip


@pytest.mark.parametrize(
    ("value", "said"),
    [(None, "-"), (True, "yes"), (65_536, "65,536"), (0.123456789, "0.123457"), (12_345.67, "12,345.7"), (math.nan, "nan"), ("a\nb", "a b"), ([], "-"), ((0.2, 1.0), "0.2, 1"), ({"a": 1_000}, "a: 1,000")],
)  # fmt: skip
def test_values_are_formatted_for_reading(value: object, said: str) -> None:
    assert format_value(value) == said


def test_text_columns_are_aligned_with_numbers_on_the_right() -> None:
    rows = [("a", 7, "x"), ("bcd", 12_345, "")]
    assert text_table(("name", "count", ""), rows) == "name   count\na          7  x\nbcd   12,345"
    assert text_table((), rows) == "a         7  x\nbcd  12,345"
    assert text_table((), []) == ""


def test_bytes_are_shown_in_the_largest_unit_that_fits() -> None:
    assert [format_bytes(n) for n in (12, 2_048, 3 * 2**20, 2**31)] == [
        "12 B",
        "2.0 KiB",
        "3.0 MiB",
        "2.0 GiB",
    ]


def test_an_error_without_text_is_named_by_its_type() -> None:
    error = ValueError("cannot read: \n  trace\n  the cause\n")
    assert (first_line(error), last_line(error)) == ("cannot read", "the cause")
    assert first_line(KeyError()) == last_line(KeyError()) == "KeyError"


def test_the_progress_bar_stays_between_0_and_100_percent() -> None:
    assert 'value="0" max="1"' in progress_html("reading", -1, 0, "")
    assert 'value="30" max="120"' in progress_html("training", 30, 120, "steps")
    assert "training 1,200/4,000  steps" in progress_html("training", 1_200, 4_000, "steps")


NOTEBOOK = """
import time
from raycl.progress import ProgressLine

started = time.monotonic()
def look():
    done = min(4, int((time.monotonic() - started) / 0.5))
    return done, 4, f"steps  <loss> {done}"
with ProgressLine("training", look, notices=lambda: ["bank: first"]):
    time.sleep(2.6)
from raycl.recipes import recipe
recipe("simclr", image_size=32)
"""


def test_a_real_notebook_draws_one_updating_bar_and_shows_values() -> None:
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(NOTEBOOK)])
    moved: list[dict[str, Any]] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                moved.append(msg)
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=120, kernel_name="python3").execute()
    outputs = notebook.cells[0].outputs
    bars = [each for each in outputs if "<progress" in each.get("data", {}).get("text/html", "")]
    assert len(bars) == 1
    assert 'value="4" max="4"' in bars[0]["data"]["text/html"]
    assert "&lt;loss&gt; 4" in bars[0]["data"]["text/html"]
    assert len({each["content"]["data"]["text/html"] for each in moved}) > 2
    assert any("bank: first" in each.get("text", "") for each in outputs)
    (shown,) = [each for each in outputs if each.output_type == "execute_result"]
    assert "encoder.name" in shown["data"]["text/html"] and "resnet18" in shown["data"]["text/plain"]


def test_wide_characters_take_two_cells() -> None:
    assert text_table((), [("鳥", 7, "x"), ("bird", 12, "x")]) == "鳥     7  x\nbird  12  x"
    assert text_table(("", "名前"), [(1, "ｶ"), (23, "カ")]) == "    名前\n 1  ｶ\n23  カ"
