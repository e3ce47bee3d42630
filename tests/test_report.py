"""The report page of finished, failed and unfinished runs."""

import html.parser
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from matplotlib.axes import Axes

from raycl.config.overrides import parse_setting
from raycl.embedding_snapshot import (
    EDGES,
    LATEST,
    EmbeddingSnapshot,
    ProbeSet,
    count_cosines,
    read_probe_set,
    read_snapshot,
    write_snapshot,
)
from raycl.errors import ConfigError, DataError, RunError, StorageError
from raycl.lease import writing
from raycl.provenance import read_commands, save_command_line, typed
from raycl.records import ROLLBACK
from raycl.report import plots
from raycl.report.history import read_history
from raycl.report.page import make_notes, query_neighbors, render_comparison
from raycl.report.plots import downsample
from raycl.report.run import read_run
from raycl.report.sections import batch_sizes, learning_panels, speed_panels
from raycl.report.snapshots import NeighborSearch, choose_queries, draw_map, project, summarize
from raycl.report.tables import differing_settings, final_metrics, run_facts
from raycl.report.writer import reported, write_comparison, write_report
from raycl.storage import Place
from tests.conftest import BUCKET
from tests.outputs import embeddings, evaluation, line_of, similarities, write_run, write_snapshots
from tests.test_cli import run_raycl

MOST_BYTES = 3 * 2**20
EVIL = "<script>alert('a')</script>&\"$x_1$"


class Page(html.parser.HTMLParser):
    """A parsed page: its elements in order, and the visible text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self._in_style = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        self._in_style = tag == "style"

    def handle_endtag(self, tag: str) -> None:
        self._in_style = False
        if tag in ("h1", "h2", "h3", "p", "li", "th", "td", "dt", "dd", "text"):
            self.text += "\n"

    def handle_data(self, data: str) -> None:
        if not self._in_style:
            self.text += data

    def named(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


def page_of(folder: Path) -> Page:
    write_report(str(folder))
    text = (folder / "report.html").read_text()
    assert len(text.encode()) < MOST_BYTES
    return Page(text)


def headings(page: Page) -> list[str]:
    return [name for name, _ in page.elements if name in ("h1", "h2", "h3")]


def drawings(page: Page) -> list[str]:
    return [each["aria-label"] or "" for each in page.named("svg") if each.get("role") == "img"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the page of a finished run with snapshots."""
    folder = tmp_path_factory.mktemp("finished")
    write_snapshots(write_run(folder / "run"))
    page_of(folder / "run")
    return folder / "run" / "report.html"


def test_class_names_in_any_script_are_drawn_as_text_without_a_warning() -> None:
    with plots.Drawing("map") as drawing:
        drawing.axes.set_title("鳥 Vögel")
        assert "鳥 Vögel" in drawing.to_svg()  # a warning would be an error here


def test_a_finished_run_has_all_drawings_and_its_headings_in_order(finished: Path) -> None:
    page = Page(finished.read_text())
    found = drawings(page)
    assert all(found)
    for drawn in ("kNN top-1 accuracy", "Learning rate", "Shares of the training time"):
        assert any(label.startswith(drawn) for label in found), drawn
    assert [sum(label.startswith(kind) for label in found) for kind in ("Map", "Histogram")] == [2, 2]
    assert all(image["alt"] for image in page.named("img"))
    assert "70.0%" in page.text  # the last evaluation
    levels = [int(name[1]) for name in headings(page)]
    assert levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_a_page_has_no_title_twice(finished: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", settings={"seed": 7})
    write_comparison([str(finished.parent), str(other)], str(tmp_path / "both.html"))
    for page in (finished, tmp_path / "both.html"):
        found = re.findall(r"<(?:h[1-3]|caption)[^>]*>([^<]*)<", page.read_text())
        assert len(found) == len(set(found)) >= 6, found


def test_a_run_in_a_folder_named_run_is_named_with_the_parent_folder(tmp_path: Path) -> None:
    for folder, name in (("demo/run", "demo/run"), ("demo/first", "first")):
        assert read_run(str(write_run(tmp_path / folder))).name == name


def test_a_run_in_the_working_folder_has_the_name_of_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(write_run(tmp_path / "first"))
    assert read_run(".").name == "first"


def test_a_batch_size_that_stays_is_a_fact_and_has_no_drawing(finished: Path, tmp_path: Path) -> None:
    page = Page(finished.read_text())
    assert re.search(r"Batch size\s+64\s", page.text)
    assert not any(label.startswith("Batch size") for label in drawings(page))
    write_run(tmp_path, [line_of(1), line_of(2, stage=1)], settings={"stages.1.batch_size": 256})
    page = page_of(tmp_path)
    assert re.search(r"Batch size\s+64, 256\s", page.text)
    assert any(label.startswith("Batch size") for label in drawings(page))


def test_long_paths_break_after_slashes_and_are_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a<b" / "run")
    (folder / "data.json").write_text('{"data": "s3://bucket/<i>/train.parquet"}')
    page_of(folder)
    text = (folder / "report.html").read_text()
    assert "<dd>s3://<wbr>bucket/<wbr>&lt;i&gt;/<wbr>train.parquet</dd>" in text
    assert "/<wbr>a&lt;b/<wbr>run" in text
    assert "samples/<wbr>" not in text


@pytest.mark.parametrize(
    ("method", "positives", "negatives"),
    [
        ("nnclr", "the nearest rows of the queue", "in the batch"),
        ("moco_v2", None, "queue"),
        ("sogclr", None, "the whole data set, by partition functions"),
        ("two_tower", None, "in the batch and explicit ones where pairs have them"),
        ("two_tower negatives.explicit=false", None, "in the batch"),
        (
            "two_tower negatives.in_batch=false negatives.explicit=false stages.0.loss=info_nce negatives.mined.num=2",
            None,
            "mined",
        ),
        ("simcse negatives.mined.num=2", None, "in the batch and mined"),
    ],
)
def test_the_facts_of_a_run_say_which_negatives_it_has_and_for_what_its_store_is_used(
    method: str, positives: str | None, negatives: str, tmp_path: Path
) -> None:
    name, *settings = method.split()
    run = write_run(tmp_path, method=name, settings=dict(map(parse_setting, settings)))
    facts = dict(run_facts(read_run(str(run))))
    assert (facts.get("Positives"), facts["Negatives"]) == (positives, negatives)


@pytest.mark.parametrize(
    ("data", "shown"), [("/a/x", "/a/x"), (["/a/x", "/b/y"], "/a/x, /b/y"), (None, "a Ray Dataset")]
)
def test_data_sets_are_joined_by_commas(data: Any, shown: str, tmp_path: Path) -> None:
    (write_run(tmp_path) / "data.json").write_text(json.dumps({"data": data}))
    assert dict(run_facts(read_run(str(tmp_path))))["Data"] == shown


COLUMNS = {
    "Loss": ["loss"],
    "Learning rate": ["learning_rate"],
    "Gap of positives and other pairs": ["positive_negative_gap"],
    "Effective rank": ["effective_rank"],
    "Standard deviation": ["embedding_std"],
    "Alignment": ["alignment"],
    "Uniformity": ["uniformity"],
    "Throughput": ["samples_per_second"],
    "Age of the stored or mined": ["negatives_age_mean", "negatives_age_max"],
    "BatchNorm leakage": ["batchnorm_leakage"],
    "Recall of held-out pairs": ["recall_at_10", "recall_at_1"],
}


def test_each_drawing_shows_the_metric_of_its_title(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: dict[str, list[list[float]]] = {}
    plot, draw = Axes.plot, plots.draw_curves

    def noted(axes: Axes, x: Any, y: Any, *more: Any, **style: Any) -> Any:
        next(reversed(drawn.values())).append([float(value) for value in y])
        return plot(axes, x, y, *more, **style)

    def named(*parts: Any, label: str, **more: Any) -> Any:
        drawn[label] = []
        return draw(*parts, label=label, **more)

    monkeypatch.setattr(Axes, "plot", noted)
    monkeypatch.setattr("raycl.report.sections.draw_curves", named)
    rng = np.random.default_rng(0)
    values = {name: rng.uniform(size=9).round(3).tolist() for names in COLUMNS.values() for name in names}
    lines = [
        line_of(10 * (at + 1), **{name: column[at] for name, column in values.items()}) for at in range(9)
    ]
    write_run(tmp_path / "run", lines)
    write_report(str(tmp_path / "run"))
    for title, names in COLUMNS.items():
        (shown,) = [figures for label, figures in drawn.items() if label.startswith(title)]
        assert shown == [values[name] for name in names], title


def test_the_page_loads_nothing_from_elsewhere_and_is_deterministic(finished: Path) -> None:
    page = Page(finished.read_text())
    addresses = [
        value
        for _, attributes in page.elements
        for name, value in attributes.items()
        if name in ("src", "href", "xlink:href") and value
    ]
    assert addresses
    assert all(address.startswith(("#", "data:")) for address in addresses)
    assert not page.named("script")
    assert b"url(http" not in finished.read_bytes()
    again = write_report(str(finished.parent), str(finished.parent / "again.html"))
    assert again.read_bytes() == finished.read_bytes()


def test_a_page_has_its_usual_name_in_a_folder(finished: Path, tmp_path: Path) -> None:
    (tmp_path / "pages").mkdir()
    for folder in ("pages", "new/"):
        place = write_report(str(finished.parent), f"{tmp_path}/{folder}")
        assert place.uri == f"{tmp_path}/{folder.strip('/')}/report.html"
        assert place.read_bytes() == finished.read_bytes()
    with pytest.raises(StorageError, match="pages is a folder; give the name of a file"):
        Place(f"{tmp_path}/pages").write_text("text")


def test_drawings_take_their_colors_from_the_page(finished: Path) -> None:
    text = finished.read_text()
    drawn = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.findall(r"#[0-9a-fA-F]{6}\b", drawn)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", drawn))
    assert {"--ink", "--muted", "--line", "--hue-0", "--hue-1"} <= used
    light, dark = (set(re.findall(rf"({name}): #", text)) for name in (r"--[a-z0-9-]+",) * 2)
    assert used <= light == dark
    assert all(text.count(f"{name}: #") == 2 for name in used)  # light and dark


def test_user_text_is_escaped(tmp_path: Path) -> None:
    name = "<script>alert(1)<'script>$x^$"
    folder = tmp_path / name
    write_run(folder, result={"status": "failed", "error": EVIL})
    texts = [f"{EVIL} number {number}" for number in range(60)]
    write_snapshots(folder, query=texts, document=texts)
    with typed(["raycl", "train", EVIL]):
        save_command_line(Place(str(folder)))
    data = folder / "data.json"
    data.write_text(json.dumps({"data": EVIL}))
    page = page_of(folder)
    assert not page.named("script")
    assert page.text.count(EVIL) >= 10
    assert name in page.text
    write_comparison([str(folder), str(write_run(tmp_path / "other"))], str(tmp_path / "both.html"))
    compared = Page((tmp_path / "both.html").read_text())
    assert not compared.named("script")
    assert name in compared.text


NO_FILE: list[dict[str, Any]] = [{"step": -1}]  # removed with its file


@pytest.mark.parametrize(
    ("lines", "result", "says"),
    [
        (NO_FILE, {"status": "failed", "error": "no room"}, "no room"),
        (None, {"status": "running"}, "still going"),
        (None, {"status": "stopped", "error": "asked"}, "was stopped"),
        (None, {"status": "failed", "error": "it broke"}, "failed at about step 200: it broke"),
        ([], {"status": "running"}, "No step has been logged"),
        ([evaluation(0, knn_top1=0.2)], {"status": "running"}, "No step has been logged"),
        ([line_of(10)], {"status": "running"}, "One step has been logged"),
        ([line_of(10), line_of(20)], {"status": "running"}, "no periodic evaluation"),
        ([line_of(10), line_of(20, loss=float("nan"))], {"status": "running"}, "loss 1 times"),
        ([line_of(10, loss=float("nan"))], {"status": "running"}, "1 of 1 values were not finite"),
    ],
)
def test_unfinished_runs_and_few_or_invalid_lines_are_noted(
    tmp_path: Path, lines: list[dict[str, Any]] | None, result: dict[str, Any], says: str
) -> None:
    write_run(tmp_path, lines, result=result)
    if lines == NO_FILE:
        (tmp_path / "metrics.jsonl").unlink()
    assert says in page_of(tmp_path).text


def test_skipped_rows_and_lines_that_are_not_json_are_counted(tmp_path: Path) -> None:
    skipped = {"invalid_rows": {"not an image": 1_234}, "skipped": {"repeated": 7}}
    write_run(tmp_path, result={"status": "finished", **skipped})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 210, "lo\n[]\n{"loss": 1}\n')
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 220, "loss": 1, "text": "\xff"}\n{"step": ' + b"[" * 100_000 + b"\n")
    text = page_of(tmp_path).text
    assert "Damaged lines of metrics.jsonl were skipped: 5." in text
    assert re.search(r"not an image\s+1,234\s+invalid", text)
    assert re.search(r"repeated\s+7\s+valid", text)


FEW = "0 held-out pairs and 40 to compare them with are too few for 1 worker"


@pytest.mark.parametrize(
    ("method", "result", "reason"),
    [
        ("two_tower", {"status": "finished", "notices": ["other", f"{FEW}: no periodic recall"]}, FEW),
        ("two_tower", {"status": "finished"}, "too few pairs were held out"),
        ("simclr", {"status": "finished"}, "the samples have no labels, or too few were held out"),
        (
            "two_tower",
            {"status": "running"},
            "too few pairs were held out, or the first evaluation is yet to come",
        ),
        (
            "two_tower",
            {"status": "failed"},
            "too few pairs were held out, or the run ended before the first evaluation",
        ),
    ],
)
def test_a_run_without_evaluation_has_the_reason(
    method: str, result: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    run = read_run(str(write_run(tmp_path, [line_of(10)], method=method, result=result)))
    assert f"The run has no periodic evaluation: {reason}." in [note.text for note in make_notes(run)]


def test_a_run_without_skipped_rows_does_not_claim_to_have_used_all(tmp_path: Path) -> None:
    text = page_of(write_run(tmp_path, settings={"stages.0.epochs": None, "stages.0.steps": 5})).text
    assert "None: no invalid row was found, and no row was skipped." in text
    assert "every row" not in text


def test_steps_undone_by_a_rollback_are_separate_curves() -> None:
    lines = [line_of(step) for step in (10, 20, 30)]
    lines.append({"step": 10, "event": ROLLBACK, "text": "went back"})
    lines += [line_of(step, loss=9.0) for step in (20, 30)]
    history = read_history(map(json.dumps, lines))
    loss = history["loss"]
    assert loss.kept().step.tolist() == [10, 20, 30]
    assert loss.kept().value.tolist()[1:] == [9.0, 9.0]
    assert loss.dropped().step.tolist() == [20, 30]
    assert history.num_steps() == 3
    assert [(event.step, event.kind) for event in history.events] == [(10, ROLLBACK)]


def test_a_run_that_ends_after_a_rollback_has_the_metrics_from_before(tmp_path: Path) -> None:
    lines = [line_of(10, loss=3.3), line_of(20, loss=9.9)]
    lines += [evaluation(20, knn_top1=0.99), {"step": 10, "event": ROLLBACK, "text": "went back"}]
    run = read_run(str(write_run(tmp_path / "a", lines)))
    assert run.history["loss"].last == 3.3
    assert run.history["knn_top1"].last is None
    (row,) = final_metrics([run]).rows
    assert "3.3" in row
    assert "9.9" not in row


@pytest.mark.parametrize("name", ["result.json", "data.json"])
@pytest.mark.parametrize("content", ['{"status": "fin', "[]", ""])
def test_a_damaged_file_is_named_in_one_line(tmp_path: Path, name: str, content: str) -> None:
    (write_run(tmp_path) / name).write_text(content)
    with pytest.raises(DataError, match=f"{name} is damaged: .*; delete it"):
        write_report(str(tmp_path))


def test_a_page_may_contain_huge_numbers_and_lone_surrogates(tmp_path: Path) -> None:
    lines = [line_of(10), line_of(20, loss=10**400), line_of(30, loss=1.5)]
    lines.append({"step": 30, "event": "tracking", "text": "half of a character: \udce9"})
    page = page_of(write_run(tmp_path, lines))
    assert "half of a character: ?" in page.text
    assert read_run(str(tmp_path)).history["loss"].value.tolist()[2] == 1.5


def test_metrics_logged_together_share_their_steps() -> None:
    lines = [json.dumps(line_of(step)) for step in range(1, 25_001)]
    history = read_history([*lines, json.dumps(evaluation(25_000, knn_top1=0.5))])
    assert history["loss"].step is history["embedding_std"].step
    assert history["loss"].is_dropped is history["embedding_std"].is_dropped
    assert history["knn_top1"].step.tolist() == [25_000]
    assert list(history.series)[:3] == ["step", "samples", "epoch"]


def test_all_of_many_events_are_listed_and_a_collapse_is_marked(tmp_path: Path) -> None:
    lines = [line_of(step) for step in range(1, 60)]
    lines += [{"step": step, "event": "tracking", "text": "a tracker failed"} for step in range(1, 41)]
    lines.append({"step": 50, "event": "collapse", "text": "nearly one point"})
    text = page_of(write_run(tmp_path, lines)).text
    assert text.count("a tracker failed") == 40
    assert re.search(r"Z\s+50\s+collapse\s+nearly one point", text)


def test_a_rolled_back_run_shows_events_with_marks(tmp_path: Path) -> None:
    lines = [line_of(step) for step in (10, 20, 30)]
    lines.append({"step": 30, "event": "collapse", "text": "nearly one point"})
    lines.append({"step": 10, "event": ROLLBACK, "text": "went back from step 30"})
    lines += [line_of(step, workers=1) for step in (20, 30)]
    text = page_of(write_run(tmp_path, lines)).text
    assert re.search(r"A\s+30\s+collapse\s+nearly one point", text)
    assert re.search(r"B\s+10\s+rollback\s+went back from step 30", text)
    assert re.search(r"C\s+20\s+workers\s+continued with 1 workers, 2 before", text)
    assert "rolled back once" in text


def test_a_snapshot_of_an_undone_step_is_noted_until_the_step_is_made_again(tmp_path: Path) -> None:
    rolled_back = [
        line_of(200),
        line_of(210),
        {"step": 100, "event": ROLLBACK, "text": "went back from step 210"},
    ]
    for name, lines, is_noted in (
        ("undone", [*rolled_back, line_of(190)], True),
        ("made", [*rolled_back, line_of(200)], False),
        ("earlier", [line_of(190), *rolled_back[2:]], False),  # the snapshot is of step 200
    ):
        write_snapshots(write_run(tmp_path / name, lines))
        texts = [note.text for note in make_notes(read_run(str(tmp_path / name)))]
        assert ("The latest embeddings are from step 200, which a rollback undid." in texts) == is_noted


def test_a_comparison_does_not_miss_the_snapshots_that_it_does_not_read(tmp_path: Path) -> None:
    for name in ("first", "second"):
        write_snapshots(write_run(tmp_path / name, result={"status": "stopped"}))
    write_comparison([str(tmp_path / name) for name in ("first", "second")], str(tmp_path / "both.html"))
    text = Page((tmp_path / "both.html").read_text()).text
    assert "The run was stopped at about step 200" in text
    assert "snapshot" not in text


def test_drawings_name_the_stages_and_their_batch_size(tmp_path: Path) -> None:
    lines = [line_of(step, stage=int(step > 50)) for step in range(10, 101, 10)]
    write_run(tmp_path, lines, settings={"stages.1.batch_size": 256})
    run = read_run(str(tmp_path))
    assert batch_sizes(run).value.tolist() == [64.0] * 5 + [256.0] * 5
    text = page_of(tmp_path).text
    assert "stage 2" in text


@given(
    st.integers(1, 2_000).flatmap(
        lambda n: arrays(np.float64, n, elements=st.floats(-1e6, 1e6) | st.just(float("nan")))
    ),
    st.integers(2, 50),
)
def test_a_downsampled_curve_keeps_every_extreme(value: np.ndarray, columns: int) -> None:
    x = np.arange(len(value), dtype=float)
    cut = downsample(x, value, columns=columns)
    assert len(cut.x) <= max(2 * columns, int(np.isnan(value).sum()) + 2 * columns)
    if not cut.is_whole:
        assert len(cut.x) <= columns
        assert cut.low.min() == np.nanmin(value)
        assert cut.high.max() == np.nanmax(value)
        assert (np.diff(cut.x) > 0).all()
        assert (cut.low <= cut.mean + 1e-6).all()
        assert (cut.mean <= cut.high + 1e-6).all()


def test_a_long_run_has_a_small_page(tmp_path: Path) -> None:
    write_run(tmp_path, [])
    lines = (json.dumps(line_of(step)) for step in range(1, 50_001))
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    write_report(str(tmp_path))
    assert (tmp_path / "report.html").stat().st_size < 600_000


def test_a_drawing_is_drawn_once(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, draw = [], Axes.draw
    monkeypatch.setattr(Axes, "draw", lambda axes, renderer: drawn.append(draw(axes, renderer)))
    with plots.Drawing("a line") as drawing:
        drawing.axes.plot([0, 1])
        assert "<path" in drawing.to_svg()
    assert len(drawn) == 1


def test_snapshots_are_read_as_written(tmp_path: Path) -> None:
    write_snapshots(tmp_path, num_samples=23)
    probes = read_probe_set(Place(str(tmp_path)))
    portrait = read_snapshot(Place(str(tmp_path)), LATEST)
    assert probes is not None
    assert portrait is not None
    assert portrait.embedding.dtype == np.float16
    assert np.array_equal(portrait.embedding, embeddings(np.arange(23) % 10, spread=0.2))
    assert portrait.step == 200
    assert portrait.key is None
    assert probes.label.tolist() == [number % 10 for number in range(23)]
    assert probes.held_out


def test_snapshots_in_the_folder_of_older_versions_are_read(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path))
    (tmp_path / "embedding_snapshots").rename(tmp_path / "portrait")
    run = read_run(str(tmp_path))
    assert run.probes is not None and run.first is not None and run.latest is not None
    write_snapshot(Place(str(tmp_path)), LATEST, replace(run.latest, step=900))
    run = read_run(str(tmp_path))
    assert run.first is not None and run.latest is not None
    assert (run.first.step, run.latest.step) == (0, 900)


def test_a_damaged_snapshot_is_reported_in_one_line(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path))
    (tmp_path / "embedding_snapshots" / "latest.parquet").write_bytes(b"nothing")
    with pytest.raises(DataError, match=r"latest.parquet is not an embedding snapshot"):
        write_report(str(tmp_path))


@pytest.mark.parametrize("name", ["samples", "first", "latest"])
@pytest.mark.parametrize(
    ("columns", "metadata"),
    [
        ({"id": [1, 2]}, {}),
        ({"id": [1, 2]}, {"held_out": True, "step": 3, "similarities": {}}),
        ({"sample_id": [1, 2], "label": [0, 1], "embedding": [[1.0], [2.0, 3.0]]}, {"step": 3}),
        ({"embedding": [1.0, 2.0]}, {"step": 3, "similarities": [1]}),
    ],
    ids=["another table", "its metadata", "lists of several lengths", "numbers"],
)
def test_a_foreign_file_in_place_of_a_snapshot_is_reported_in_one_line(
    tmp_path: Path, name: str, columns: dict[str, Any], metadata: dict[str, Any]
) -> None:
    write_snapshots(write_run(tmp_path))
    table = pa.table(columns).replace_schema_metadata({"raycl": json.dumps(metadata)})
    pq.write_table(table, tmp_path / "embedding_snapshots" / f"{name}.parquet")
    with pytest.raises(DataError, match=rf"{name}.parquet is not an embedding snapshot") as caught:
        write_report(str(tmp_path))
    assert "\n" not in str(caught.value)


def test_neighbors_have_the_highest_cosines_and_exclude_the_query(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path))
    run = read_run(str(tmp_path))
    assert run.probes is not None and run.first is not None and run.latest is not None
    found = query_neighbors(run)
    assert [each.query.label for each in found] == list("01235679")
    rows = run.latest.embedding.astype(np.float32)
    for query, each in zip((0, 1, 2, 3, 5, 6, 7, 9), found, strict=True):
        assert each.now is not None
        cosines = np.sort(np.delete(rows @ rows[query], query))[::-1][:6]
        assert [one.cosine for one in each.now] == pytest.approx(cosines.tolist(), abs=1e-5)
        assert [one.is_right for one in each.now] == [
            one.sample.label == each.query.label for one in each.now
        ]
    before, now = (NeighborSearch(run.probes, each).right_fraction() for each in (run.first, run.latest))
    assert before is not None and now is not None and before < now


@pytest.mark.parametrize("per_document", [2, 20])
def test_a_pair_is_found_by_its_own_key_or_an_equal_one(tmp_path: Path, per_document: int) -> None:
    documents = np.arange(60) // per_document
    write_snapshots(
        write_run(tmp_path),
        query=[f"query {number}" for number in range(60)],
        document=[f"document {number}" for number in documents],
    )
    run = read_run(str(tmp_path))
    for each in query_neighbors(run):
        assert each.now is not None and each.query.text is not None
        own = f"document {documents[int(each.query.text.split()[1])]}"
        assert [one.is_right for one in each.now] == [one.sample.text == own for one in each.now]
        assert any(one.is_right for one in each.now)
    # With every query equal to its document, every query finds its key.
    assert run.probes is not None and run.latest is not None
    rows = np.eye(30, dtype=np.float16)[documents]
    perfect = replace(run.latest, embedding=rows, key=rows)
    for each in query_neighbors(replace(run, first=None, latest=perfect)):
        assert each.before is None and each.now is not None
        assert all(one.is_right for one in each.now[: min(per_document, 6)])
    assert NeighborSearch(run.probes, perfect).right_fraction() == 1.0


def test_class_names_are_part_of_the_data(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path, []))
    data = json.loads((tmp_path / "data.json").read_text())
    names = [f"a class of a long name, {number}" for number in range(10)]
    (tmp_path / "data.json").write_text(json.dumps(data | {"classes": names}))
    page = page_of(tmp_path)
    assert "label a class of a long name, 3" in page.text
    assert "a class… name, 3" in page.text  # shortened on the map
    (tmp_path / "data.json").write_text(json.dumps(data | {"classes": None, "label_names": names}))
    assert "label a class of a long name, 3" in page_of(tmp_path).text
    (tmp_path / "data.json").write_text(json.dumps(data | {"classes": ["m²", "²", "--5", "٣", *names[4:]]}))
    assert "label ²" in page_of(tmp_path).text


def test_neighbors_are_searched_for_in_blocks_of_queries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_snapshots(write_run(tmp_path))
    run = read_run(str(tmp_path))
    assert run.probes is not None and run.latest is not None
    num = 2_500
    rows = np.random.default_rng(0).normal(size=(num, 16)).astype(np.float16)
    probes = replace(run.probes, label=np.arange(num) % 10)
    search = NeighborSearch(probes, replace(run.latest, embedding=rows))
    tracemalloc.start()
    found, cosines, is_right = search.search(np.arange(num))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < num**2 * 8  # of one matrix of positions
    monkeypatch.setattr("raycl.report.snapshots._QUERIES_PER_BLOCK", num)
    whole = search.search(np.arange(num))
    np.testing.assert_allclose(cosines, whole[1], rtol=1e-5)
    for ours, expected in ((found, whole[0]), (is_right, whole[2])):
        assert (ours == expected).mean() > 0.999  # near ties may be in another order


def test_neighbors_without_a_label_count_neither_as_right_nor_as_wrong(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path))
    run = read_run(str(tmp_path))
    assert run.probes is not None and run.latest is not None
    label = run.probes.label.copy()
    label[label > 4] = -1
    rows = np.eye(16, dtype=np.float16)[[0] * 60]  # all samples are neighbors, those with low numbers first
    search = NeighborSearch(replace(run.probes, label=label), replace(run.latest, embedding=rows))
    # Each label has five other samples.
    neighbors = [[other for other in range(7) if other != query][:5] for query in range(60)]
    known = [label[each] == label[query] for query in range(60) for each in neighbors[query]
             if label[query] >= 0 and label[each] >= 0]  # fmt: skip
    assert search.right_fraction() == pytest.approx(np.mean(known))
    alone = replace(run.latest, embedding=rows[:1])
    probes = replace(run.probes, sample_id=run.probes.sample_id[:1], label=label[:1])
    assert NeighborSearch(probes, alone).right_fraction() is None


def test_embeddings_that_are_not_finite_are_skipped_and_counted(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path, []))
    portrait = read_snapshot(Place(str(tmp_path)), LATEST)
    assert portrait is not None
    rows = portrait.embedding.copy()
    rows[:7] = np.nan
    write_snapshot(Place(str(tmp_path)), LATEST, replace(portrait, embedding=rows))
    assert "7 that were not finite are skipped" in page_of(tmp_path).text
    rows[:] = np.nan
    write_snapshot(Place(str(tmp_path)), LATEST, replace(portrait, embedding=rows))
    page_of(tmp_path)


def test_a_collapsed_encoder_has_no_map(tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path, []))
    rows = np.tile(embeddings(np.zeros(1, int), spread=0.0), (60, 1))
    portrait = EmbeddingSnapshot(step=300, embedding=rows, key=None, similarities=similarities(rows, rows))
    write_snapshot(Place(str(tmp_path)), LATEST, portrait)
    page = page_of(tmp_path)
    assert "nearly one point" in page.text
    assert sum(label.startswith("Map") for label in drawings(page)) == 1


@pytest.mark.parametrize("num_rows", [2, 3, 5, 29, 40])
def test_a_map_has_a_point_for_every_sample(num_rows: int) -> None:
    places = project(embeddings(np.arange(num_rows), spread=1.0).astype(np.float32))
    if num_rows < 3:
        assert places is None
    else:
        assert places is not None
        assert places.shape == (num_rows, 2)
        assert np.isfinite(places).all()


@given(arrays(np.float64, st.integers(1, 300), elements=st.floats(-1.01, 1.01) | st.just(float("nan"))))
def test_every_cosine_is_counted_once_in_its_bin(cosines: np.ndarray) -> None:
    counts = count_cosines(cosines)
    assert counts.sum() == np.isfinite(cosines).sum()
    middles = (EDGES[1:] + EDGES[:-1]) / 2
    good = np.clip(cosines[np.isfinite(cosines)], -1, 1)
    if len(good):
        assert counts @ middles / counts.sum() == pytest.approx(good.mean(), abs=0.0101)


def test_the_summary_of_a_histogram_equals_the_statistics_of_its_pairs() -> None:
    rng = np.random.default_rng(0)
    first = rng.normal(size=(80, 8))
    first /= np.linalg.norm(first, axis=1, keepdims=True)
    second = first + 0.5 * rng.normal(size=first.shape)
    second /= np.linalg.norm(second, axis=1, keepdims=True)
    cosines = first @ second.T
    positives, negatives = cosines.diagonal(), cosines[~np.eye(80, dtype=bool)]
    summary = summarize(similarities(first, second))
    assert summary is not None
    assert summary.positives == pytest.approx(positives.mean(), abs=0.01)
    assert summary.negatives == pytest.approx(negatives.mean(), abs=0.01)
    assert summary.positive_is_closer == pytest.approx((positives[:, None] > negatives).mean(), abs=0.01)


def test_a_comparison_shows_differing_settings_and_final_metrics(tmp_path: Path) -> None:
    first = write_run(tmp_path / "low")
    second = write_run(
        tmp_path / "high",
        settings={"stages.0.temperature": 0.5, "stages.0.batch_size": 128},
        result={"status": "failed", "error": "lost"},
    )
    write_comparison([str(first), str(second)], str(tmp_path / "both.html"))
    page = Page((tmp_path / "both.html").read_text())
    assert re.search(r"stages\.0\.temperature\s+\S+\s+0\.5", page.text)
    assert re.search(r"stages\.0\.batch_size\s+64\s+128", page.text)
    assert "learning_rate_scaling" not in page.text
    assert re.search(r"low\s+finished\s+200", page.text)
    assert any(label.startswith("Loss by samples") for label in drawings(page))
    assert "failed at about step 200: lost" in page.text
    same_name = write_run(tmp_path / "other" / "low")
    write_comparison([str(first), str(same_name)], str(tmp_path / "both.html"))
    text = Page((tmp_path / "both.html").read_text()).text
    for folder in (first, same_name):
        assert re.search(rf"{re.escape(str(folder))}\s+finished", text)


def test_more_runs_than_colors_and_dashes_are_refused(tmp_path: Path) -> None:
    run = read_run(str(write_run(tmp_path)))
    with pytest.raises(ConfigError, match="33 runs are more than the 32"):
        render_comparison([run] * 33)


def test_a_run_that_fails_gets_a_page_and_a_refused_run_does_not(tmp_path: Path) -> None:
    with pytest.raises(RunError), reported(str(tmp_path)):
        write_run(tmp_path, result={"status": "failed", "error": "a worker was lost"})
        raise RunError("a worker was lost")
    page = tmp_path / "report.html"
    assert "a worker was lost" in page.read_text()
    page.unlink()
    with pytest.raises(RunError), reported(str(tmp_path)):  # the resumed run fails with the same text
        write_run(tmp_path, result={"status": "failed", "error": "a worker was lost"})
        raise RunError("a worker was lost")
    page.unlink()
    with pytest.raises(ConfigError), reported(str(tmp_path)):
        raise ConfigError("the output holds a run already")
    assert not page.exists()


def test_a_signal_while_the_page_is_drawn_does_not_change_the_status_of_a_finished_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: str) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("raycl.report.writer.write_report", interrupted)
    with reported(str(tmp_path)):
        write_run(tmp_path)
    assert "no report was written: interrupted" in capsys.readouterr().err


@given(
    arguments=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9))
)
@settings(max_examples=60, deadline=None)
@example(arguments=["data:\n  columns: {image: 'it\\'s'}\n", "\x85\u2028", "a\n"])
def test_a_recorded_command_runs_in_a_shell_as_it_was_typed(arguments: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder, typed(["printf", "%s\\0", *arguments, "end"]):
        save_command_line(Place(folder))
        (line,) = read_commands(Place(folder))
    environment = {"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]}
    printed = subprocess.run(["bash", "-c", line], check=True, capture_output=True, env=environment).stdout
    assert printed.decode().split("\0")[:-1] == [*arguments, "end"]


def test_each_start_of_a_run_records_its_command(tmp_path: Path) -> None:
    output = Place(str(tmp_path))
    save_command_line(output)
    assert not (tmp_path / "command.txt").exists()  # no command was typed
    with typed(["/usr/bin/raycl", "train", "simclr", "--data", "my images\nhere"]):
        save_command_line(output)
    with typed(["jobs/train.py", "simclr", "--resume"]):
        save_command_line(output)
    assert read_commands(output) == [
        r"raycl train simclr --data $'my images\u000ahere'",
        "python jobs/train.py simclr --resume",
    ]
    write_run(tmp_path)
    assert "python jobs/train.py simclr --resume" in page_of(tmp_path).text


def test_the_command_writes_a_page_and_prints_its_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write_run(tmp_path / name) for name in ("one", "two")]
    status, out, _ = run_raycl(monkeypatch, capsys, "report", folders[0])
    assert (status, out.strip()) == (0, str(folders[0] / "report.html"))
    status, out, _ = run_raycl(
        monkeypatch, capsys, "report", "--run", folders[0], "--output", tmp_path / "a.html"
    )
    assert (status, out.strip()) == (0, str(tmp_path / "a.html"))
    assert (tmp_path / "a.html").read_text() == (folders[0] / "report.html").read_text()
    monkeypatch.chdir(tmp_path)
    assert run_raycl(monkeypatch, capsys, "report", *folders)[:2] == (0, "comparison.html\n")
    assert "2 runs compared" in (tmp_path / "comparison.html").read_text()


@pytest.mark.parametrize(
    ("prepare", "says"),
    [
        (lambda folder: [], "needs a run"),
        (lambda folder: [folder / "nowhere"], "holds no run"),
        (lambda folder: [folder, folder], "given twice"),
        (
            lambda folder: (folder / "metrics.jsonl").unlink() or [folder],
            "ended before its first logged step; repeat its `raycl train` with --resume",
        ),
        (lambda folder: (folder / "config.yaml").write_text("recipe: [") and [folder], "is not valid YAML"),
    ],
)
def test_an_output_without_a_run_is_refused_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    prepare: Any,
    says: str,
) -> None:
    folder = write_run(tmp_path / "run", result={"status": "running"})
    status, out, err = run_raycl(monkeypatch, capsys, "report", *prepare(folder))
    assert (status, out) == (2, "")
    assert says in err
    assert err.startswith("raycl: ")
    assert err.count("\n") == 1


def test_a_run_that_is_written_and_has_no_line_yet_has_just_started(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", result={"status": "running"})
    (folder / "metrics.jsonl").unlink()
    with writing(Place(str(folder))), pytest.raises(DataError, match="just started; try again in a minute"):
        read_run(str(folder))


def test_a_run_on_s3_gets_its_page_there(s3_server: str, tmp_path: Path) -> None:
    write_snapshots(write_run(tmp_path / "run"))
    there = Place(f"s3://{BUCKET}/reported/run")
    for path, _ in Place(str(tmp_path / "run")).files():
        (there / path).write_bytes((tmp_path / "run" / path).read_bytes())
    place = write_report(there.uri)
    assert place.uri == f"s3://{BUCKET}/reported/run/report.html"
    page = Page(place.read_text())
    assert sum(label.startswith("Map") for label in drawings(page)) == 2


def test_the_report_imports_neither_torch_nor_ray() -> None:
    code = "import raycl.report.page, sys; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_infinite_values_count_as_not_finite() -> None:
    lines = [json.dumps(line_of(1)), json.dumps(line_of(2, loss=float("inf"), embedding_std=1e999))]
    history = read_history(lines)
    assert (history["loss"].num_bad, history["embedding_std"].num_bad) == (1, 1)
    assert history["loss"].last == pytest.approx(4 / 1.02)


@pytest.mark.parametrize(
    ("recipe", "metric", "name"),
    [("simclr", "knn_top1", "raw pixels"), ("two_tower", "recall_at_10", "BM25")],
)
def test_the_evaluation_names_the_baseline(recipe: str, metric: str, name: str, tmp_path: Path) -> None:
    lines = [line_of(10), evaluation(10, **{metric: 0.5}), evaluation(20, **{metric: 0.625})]
    for baseline, expected in (
        ({}, "first 50.0%"),
        ({f"baseline_{metric}": 0.25}, f"first 50.0%, {name} 25.0%"),
    ):
        run = write_run(tmp_path / f"{len(baseline)}", [*lines[:2], lines[2] | baseline], method=recipe)
        panel = learning_panels(read_run(str(run)))[1]
        assert panel.caption.endswith(expected)


LAPS = [
    line_of(10, seconds=1.0, samples_per_second=640.0, data_wait_fraction=0.1),
    line_of(20, seconds=9.0, samples_per_second=80.0, data_wait_fraction=0.5),
]
UNDONE = [
    *LAPS,
    {"step": 10, "samples": 640, "seconds": 9.0, "event": ROLLBACK, "text": "went back"},
    line_of(20, seconds=12.0, samples_per_second=213.0, data_wait_fraction=0.3),
]


@pytest.mark.parametrize(
    ("lines", "rate", "waits"),
    [(LAPS, 142.2, 45.6), (UNDONE, 106.7, 25.0)],
    ids=["laps of several lengths", "a rollback"],
)
def test_an_unfinished_run_has_the_means_over_its_training_time(
    lines: list[dict[str, Any]], rate: float, waits: float, tmp_path: Path
) -> None:
    run = read_run(str(write_run(tmp_path, lines, result={"status": "stopped"})))
    table = final_metrics([run])
    found = dict(zip(table.columns, table.rows[0], strict=True))
    assert (found["samples/s"], found["waits for data"]) == (f"{rate}", f"{waits}%")
    assert f"wait for data {waits}%" in speed_panels(run)[1].caption
    assert re.search(rf"samples/s\s+{rate:.0f}\s", page_of(tmp_path).text)


def test_a_finished_run_has_the_throughput_of_its_result(tmp_path: Path) -> None:
    assert re.search(r"samples/s\s+640\s", page_of(write_run(tmp_path)).text)


def _perfect(label: list[int]) -> tuple[ProbeSet, EmbeddingSnapshot]:
    """Return samples with these labels, and embeddings that are equal within a class and orthogonal to others."""
    rows = np.eye(max(label) + 2, dtype=np.float16)[label]
    contents = {"text": [f"text {number}" for number in range(len(label))]}
    probes = ProbeSet(
        sample_id=np.arange(len(label)), label=np.array(label), contents=contents, held_out=True
    )
    counts = similarities(rows, rows)
    return probes, EmbeddingSnapshot(step=1, embedding=rows, key=None, similarities=counts)


@pytest.mark.parametrize(
    ("label", "expected"),
    [([0, 0, 1, 1, 1, 2, 3, -1], 1.0), ([0, 1, 2, 3], None), ([0] * 9 + [1] * 9, 1.0)],
    ids=["small classes", "no class of two", "large classes"],
)
def test_all_neighbors_of_a_perfect_encoder_are_right(label: list[int], expected: float | None) -> None:
    assert NeighborSearch(*_perfect(label)).right_fraction() == expected


@pytest.mark.parametrize(
    ("label", "expected"),
    [
        ([*range(100), *range(40, 60)], [40, 42, 45, 48, 50, 53, 56, 59]),
        ([*range(20), 7, 11], [7, 11, 0, 2, 4, 8, 10, 14]),
        ([-1, 3, 3, 4], [3, 4]),
    ],
    ids=["enough classes of two", "few classes of two", "few classes"],
)
def test_queries_are_of_classes_with_other_samples_first(label: list[int], expected: list[int]) -> None:
    probes, snapshot = _perfect(label)
    assert probes.label[choose_queries(probes, [snapshot])].tolist() == expected


@pytest.mark.parametrize(
    ("settings", "over"),
    [
        ({"stages.1.batch_size": 64}, "step"),
        ({"stages.1.batch_size": 128}, "samples"),
        ({"stages.0.batch_size": 128}, "samples"),
    ],
    ids=["another stage of the same size", "another stage of another size", "another size"],
)
def test_runs_with_different_batch_sizes_are_compared_by_samples(
    settings: dict[str, Any], over: str, tmp_path: Path
) -> None:
    runs = [
        read_run(str(write_run(tmp_path / "one"))),
        read_run(str(write_run(tmp_path / "two", settings=settings))),
    ]
    text = render_comparison(runs)
    assert f"Loss by {over}" in text
    assert ("The batch sizes differ" in text) == (over == "samples")


def test_settings_without_an_effect_in_any_run_do_not_differ(tmp_path: Path) -> None:
    settings = ({}, {"stages.1.batch_size": 64})
    runs = [
        read_run(str(write_run(tmp_path / f"{number}", [], settings=each)))
        for number, each in enumerate(settings)
    ]
    rows = differing_settings(runs).rows
    assert ("stages.1.batch_size", "-", "64") in rows
    assert [row for row in rows if len(set(row[1:])) == 1] == []


def test_a_stage_without_a_logged_line_keeps_its_number(tmp_path: Path) -> None:
    stages = {f"stages.{number}.batch_size": 64 for number in (1, 2)}
    for name, lines, has_stage_3 in (
        ("first", [line_of(10), line_of(20)], False),
        ("third", [line_of(10), line_of(20, stage=2)], True),
        ("only third", [line_of(20, stage=2)], True),
    ):
        drawing = learning_panels(read_run(str(write_run(tmp_path / name, lines, settings=stages))))[
            0
        ].drawing
        assert (" stage 3" in drawing) == has_stage_3
        assert " stage 2" not in drawing
        assert "--band" not in drawing  # the second stage is shaded


def test_a_comparison_has_all_warnings_of_a_run(tmp_path: Path) -> None:
    lines = [line_of(10, loss=float("nan")), {"step": 10, "event": "collapse", "text": "one point"}]
    first = write_run(tmp_path / "first", lines, result={"status": "running"})
    with (first / "metrics.jsonl").open("a") as file:
        file.write("damaged\n")
    text = render_comparison([read_run(str(first)), read_run(str(write_run(tmp_path / "second")))])
    for note in ("still going", "NaN or infinite", "Damaged lines", "The embeddings collapsed"):
        assert note in text


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["2", "a class of a long name, 1", "a class of a long name, 2"], ["2", "a class… name, 1", "a class… name, 2"]),
        (["animals/cat/small-ones", "animals/dog/small-ones"], ["animals/cat/sma…", "animals/dog/sma…"]),
        (["one of sixteen l.", "sixteen letters."], ["one of …xteen l.", "sixteen letters."]),
    ],
    ids=["different ends", "different middles", "one long name"],
)  # fmt: skip
def test_long_names_of_classes_stay_different_on_the_map(names: list[str], shown: list[str]) -> None:
    points = np.random.default_rng(0).normal(size=(5 * len(names), 2))
    drawing = draw_map(points, names * 5, label="map", named=True)
    assert [drawing.count(f">{name}<") for name in shown] == [1] * len(names)


@pytest.mark.parametrize("kind", ["image", "text"])
@pytest.mark.parametrize(
    ("missing", "columns"),
    [("latest", ["Before training"]), ("first", ["At step 200"]), (None, ["Before training", "At step 200"])],
)
def test_neighbors_are_shown_of_the_snapshots_that_exist(
    kind: str, missing: str | None, columns: list[str], tmp_path: Path
) -> None:
    texts: dict[str, Any] = {"text": [f"text {number}" for number in range(60)]} if kind == "text" else {}
    write_snapshots(write_run(tmp_path, []), **texts)
    if missing:
        (tmp_path / "embedding_snapshots" / f"{missing}.parquet").unlink()
    page_of(tmp_path)
    text = (tmp_path / "report.html").read_text()
    section = text[text.index('<h2 id="neighbors">') : text.index('<h2 id="map">')]
    is_image = kind == "image"
    assert ('class="neighbors pictures"' in section) == is_image
    assert re.findall(r'<th scope="col">([^<]*)<', section) == ["Query"] * is_image + columns
    assert ("✗ and a dashed frame" if is_image else "✓ has the same label, ✗ another") in section
    assert section.count("<td>") == 8 * len(columns)
    assert (f'colspan="{len(columns)}"' in section) != is_image
