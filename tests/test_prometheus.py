"""The metrics exported by Ray, and the dashboard that shows them."""

import json
import re
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from raycl.tracking.prometheus import METRICS

DASHBOARD = json.loads((Path(__file__).parent.parent / "deploy" / "grafana.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [(panel["title"], target["expr"]) for panel in PANELS for target in panel["targets"]]
EXPORTED = {metric.exported: metric for metric in METRICS.values()}


def names_in(query: str) -> set[str]:
    return set(re.findall(r"\bray_\w+", query))


@pytest.mark.parametrize("metric", METRICS.values(), ids=lambda metric: metric.name)
def test_metric_names_and_tags_are_valid_in_prometheus(metric: Any) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*[a-z0-9]", metric.name)
    # Prometheus adds this suffix to counters; a gauge with it would be mistaken for a counter.
    assert not metric.name.endswith("_total")
    tags = [*metric.tags, *filter(None, [metric.by])]
    assert len(set(tags)) == len(tags)
    assert metric.description


def test_metric_names_are_unique() -> None:
    assert len(EXPORTED) == len(METRICS)
    assert all(metric.name == name for name, metric in METRICS.items())


@pytest.mark.parametrize(("title", "query"), QUERIES)
def test_every_query_uses_an_exported_metric_and_filters_by_the_chosen_runs(title: str, query: str) -> None:
    assert names_in(query)
    for name in names_in(query):
        metric = EXPORTED[name]
        assert f'{name}{{run=~"$run"}}' in query, title
        assert query.count("rate(") == (metric.kind == "counter"), title
        [group] = re.findall(r"by \(([\w, ]+)\)", query)
        assert set(group.split(", ")) <= {*metric.tags, metric.by}, title


@pytest.mark.parametrize(
    ("panel", "target"),
    [(panel, target) for panel in PANELS for target in panel["targets"]],
    ids=[query for _, query in QUERIES],
)
def test_lines_are_labeled_by_the_tags_of_their_query(panel: Any, target: Any) -> None:
    [group] = re.findall(r"by \(([\w, ]+)\)", target["expr"])
    named = set(re.findall(r"{{(\w+)}}", target["legendFormat"]))
    assert named <= set(group.split(", "))
    if metric_by := EXPORTED[names_in(target["expr"]).pop()].by:
        assert metric_by in named
    legends = [other["legendFormat"] for other in panel["targets"]]
    assert len(set(legends)) == len(legends)


def test_every_metric_is_shown() -> None:
    assert {name for _, query in QUERIES for name in names_in(query)} == set(EXPORTED)


def test_runs_and_data_source_are_chosen_by_variables() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert variables["datasource"]["query"] == "prometheus"
    assert names_in(variables["run"]["definition"]) <= set(EXPORTED)
    for panel in PANELS:
        assert {each["datasource"]["uid"] for each in [panel, *panel["targets"]]} == {"${datasource}"}


def test_panels_have_unique_ids_and_do_not_overlap() -> None:
    everything = DASHBOARD["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    for one, other in combinations([panel["gridPos"] for panel in everything], 2):
        apart = (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )
        assert apart, (one, other)
