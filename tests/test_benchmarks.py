"""The command that runs all benchmarks: reading results, running scripts, and writing the page."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import accumulate  # pyright: ignore[reportMissingImports]
import run  # pyright: ignore[reportMissingImports]
from comparisons import (  # pyright: ignore[reportMissingImports]
    AbsentError,
    Benchmark,
    Comparison,
    Measured,
    Number,
    read_number,
)
from performance_page import BEGIN, END  # pyright: ignore[reportMissingImports]
from result_tables import CHUNK_SIDES  # pyright: ignore[reportMissingImports]
from suite import SECTIONS, SUITE  # pyright: ignore[reportMissingImports]

BY_NAME = {benchmark.name: benchmark for benchmark in SUITE}


# Results in the format of the scripts, with fewer rows


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.9 * median, "max": 1.2 * median}


def cells(**sides: tuple[float, float]) -> dict[str, Any]:
    rows = [
        {"name": name, "size": size, "dim": dim, "num_negatives": 65_536, "value": 8.0}
        | {"cpu_ms": spread(ms), "wall_ms": spread(2 * ms), "memory_mb": mb}
        for size, dim in ((256, 128), (1_024, 128), (4_096, 128), (4_096, 512))
        for name, (ms, mb) in sides.items()
    ]
    return {"machine": {"cpu": "AMD EPYC"}, "temperature": 0.1, "cells": rows}


def rates(**sides: list[float]) -> dict[str, Any]:
    named = {name.replace("_", " "): runs for name, runs in sides.items()}
    medians = {name: sorted(runs)[len(runs) // 2] for name, runs in named.items()}
    return {
        "settings": {"data": "train.parquet"},
        "rates": named,
        "medians": medians,
        "machine": {"cores": 2},
    }


def bank_result(method: str, step_ms: float) -> dict[str, Any]:
    return {
        "method": method,
        "ratio": spread(1.03),
        "process_step_ms": spread(step_ms),
        "process_waited_percent": spread(0.1),
        "process_store_percent": spread(0.3),
        "actor_step_ms": spread(1.04 * step_ms),
        "actor_waited_percent": spread(0.3),
        "actor_store_percent": spread(1.5),
        "memory": {"held_mb": 711.0, "rows_mb": 656.0, "ratio": 1.08},
    }


def bank_rates() -> dict[str, Any]:
    us = {"read actor": 5_607, "read store": 530, "read numpy": 747}
    us |= {"write actor": 2_345, "write store": 188, "write numpy": 28}
    return {name: {"us": taken, "rows_per_s": 4_352 / taken * 1e6} for name, taken in us.items()}


LINES = {"whole": (14.9, 8_737), "raycl-1": (22.1, 768), "raycl-4": (20.1, 2_108)}
LINES |= {"gradcache": (21.8, 799), "sentence-transformers": (21.8, 922)}
BATCHNORM_LINES = {"whole-batchnorm": (10.0, 4_000), "lockstep": (12.0, 1_000)}
TRAINED = {"raycl": (1_953.0, 2_929.0), "sentence-transformers": (570.0, 3_104.0)}
MOVED = {"gather": 1.57e6, "gather's gradient": 3.1e6, "parameters' gradient": 1.4e7}
TIMES = {"wall_s": 68.8, "cpu_s": 130.0, "value": 9.1, "memory_mb": 168.0}
RESULTS: dict[str, Any] = {
    "simclr": rates(raycl=[60.0, 62.0, 70.0], lightly=[40.0, 31.0, 30.0], encoder=[80.0, 64.0, 60.0]),
    "simclr_bfloat16": rates(raycl=[93.0], lightly=[60.0], encoder=[100.0]),
    "moco_v2": rates(raycl=[60.0], lightly=[40.0], encoder=[64.0]),
    "moco_v2_bfloat16": rates(raycl=[93.0], lightly=[60.0], encoder=[100.0]),
    "pairs": {
        "machine": {"cpu": "AMD EPYC"},
        "settings": {"workers": 2},
        "lines": [
            {"encoder": encoder, "side": side, "samples_per_second": spread(rate), "workers_mb": spread(mb)}
            for encoder in ("bag_of_subwords", "transformer")
            for side, (rate, mb) in TRAINED.items()
        ],
    },
    "data_path_32": rates(held=[9e3], stream=[4e3], lightly=[1.5e3], own_views=[5e3], decoding=[2e4]),
    "data_path_224": rates(
        held=[500.0], stream=[400.0], lightly=[150.0], own_views=[450.0], decoding=[900.0]
    ),
    "augment": {
        "torch": "2.15.0",
        "rows": [
            {"size": size, "stored": size, "name": name, "us_per_view": us, "times": us / 40}
            for size in (32, 96, 224)
            for name, us in {"raycl": 40, "lightly SimCLRTransform": 600, "torchvision v2, PIL": 800}.items()
        ],
    },
    "nt_xent": cells(raycl=(28.0, 11.3), lightly=(138.3, 81.9), plain=(90.1, 86.2)),
    "bidirectional": cells(raycl=(11.8, 6.4), open_clip=(30.2, 21.1), plain=(23.9, 23.8)),
    "hinge": cells(raycl=(8.8, 4.3), plain=(25.8, 30.0)),
    "queue_loss": cells(raycl=(9.8, 3.3), lightly=(35.1, 39.2), plain=(23.8, 43.3)),
    "batchnorm": [
        {"shape": [256, 64, 32, 32], "dtype": dtype, "layout": layout}
        | {"nn_ms": 119.87, "synchronized_ms": 122.11, "ratio": 1.019}
        for dtype in ("float32", "bfloat16")
        for layout in ("NCHW", "channels_last")
    ],
    "accumulate": {
        "machine": {"cpu": "AMD EPYC"},
        "lines": [
            {"network": network, "side": side, "cpu_s": spread(times * seconds), "wall_s": spread(seconds)}
            | {"memory_mb": mb, "value": 4.9, "error": error}
            for network, times, error in (("resnet", 2, 1.8e-3), ("transformer", 1, None))
            for side, (seconds, mb) in (LINES | (BATCHNORM_LINES if network == "resnet" else {})).items()
        ],
    },
    "knn": [
        {"method": method, "num_rows": 50_000, "seconds": seconds, "cpu_seconds": seconds}
        | {"extra_mb": mb, "top1": 0.7991}
        for method, seconds, mb in (("raycl", 5.14, 205), ("scikit-learn", 10.44, 1_566))
    ],
    "bank": {
        "machine": {"cpu": "AMD EPYC"},
        "results": [
            bank_result("moco_v2", 96.2),
            bank_result("instance_discrimination", 140.0) | {"rates": bank_rates()},
        ],
    },
    "step_profile": {
        "steps": {
            recipe: {"data": 4.0, "forward": 900.0, "backward": 1_800.0, "wall": 2_900.0}
            for recipe in ("simclr", "moco_v2", "instance_discrimination", "two_tower")
        },
        "settings": {"workers": 2},
        "machine": {"cpu": "AMD EPYC"},
    },
    "startup": {
        "seconds": {
            name: spread(9.0) for name in ("accepted", "worker up", "first forward", "first step", "end")
        },
        "settings": {"workers": 2},
        "machine": {"cpu": "AMD EPYC"},
    },
    "growth": {
        "points": {
            kind: [{"size": size, "seconds": 0.5, "mb": 12.0} for size in sizes]
            for kind, sizes in {
                "rows": (100_000, 1_000_000),
                "queue": (1_048_576,),
                "bank": (1_000_000, 10_000_000),
                "batch": (65_536,),
            }.items()
        },
        "exponents": {"rows": 1.0, "queue": 1.1, "bank": 0.1, "batch": 1.9},
        "machine": {"cpu": "AMD EPYC"},
    },
    "large_batch": {
        "machine": {"cpu": "AMD EPYC"},
        "step": {
            "step_s": 137.5,
            "samples_per_second": 477.0,
            "data_wait_fraction": 0.028,
            "loss": [11.7, 11.6, 11.6],
            "peak_mb": {"train worker": 7_900.0, "Controller": 700.0},
        },
        "losses": {"nt_xent": TIMES, "info_nce": TIMES},
    },
    "scale_training": {
        "machine": {"cpu": "AMD EPYC"},
        "batch_size": 4_096,
        "results": [
            {"workers": workers, "measured": MOVED | {"loss_ms": 30.0}, "model": MOVED, "gflop_per_s": 60.0}
            for workers in (1, 2, 4)
        ],
    },
}


def measured(name: str, results: dict[str, Any], *, is_evaluated: bool = True) -> list[Measured]:
    found = list(BY_NAME[name].measured(results, is_evaluated=is_evaluated))
    assert not [line for line in found if isinstance(line, AbsentError)]
    return found


# Reading


def test_names_sections_and_scripts_of_the_suite_are_consistent() -> None:
    assert len(BY_NAME) == len(SUITE)
    assert {benchmark.section for benchmark in SUITE} == set(SECTIONS)
    assert all((run.FOLDER / benchmark.script).exists() for benchmark in SUITE)
    assert {each.other_of for benchmark in SUITE for each in benchmark.comparisons} <= {None, *BY_NAME}


@pytest.mark.parametrize("name", BY_NAME)
def test_scripts_accept_the_flags_of_the_suite(name: str) -> None:
    source = (run.FOLDER / BY_NAME[name].script).read_text()
    flags = {word for word in BY_NAME[name].words(quick=True) if word.startswith("--")}
    assert "make_parser(__doc__)" in source  # has --json
    assert all(f'"{flag}"' in source for flag in flags)


@pytest.mark.parametrize("name", BY_NAME)
def test_every_comparison_is_found_in_a_result(name: str) -> None:
    for headline in measured(name, RESULTS):
        assert headline.own.median > 0
        assert (headline.ratio is None) == (headline.of.peer == "")


def test_higher_rates_and_lower_times_win() -> None:
    lightly, encoder = measured("simclr", RESULTS)
    assert (lightly.own, lightly.other) == (Number(62.0, 60.0, 70.0), Number(31.0, 30.0, 40.0))
    assert (lightly.ratio, lightly.verdict) == (2.0, "met")
    assert encoder.ratio == 62 / 64
    time, memory = measured("queue_loss", RESULTS)[0::2]
    assert time.ratio == pytest.approx(35.1 / 9.8)
    assert memory.ratio == pytest.approx(39.2 / 3.3)
    assert time.own == Number(9.8, pytest.approx(8.82), pytest.approx(11.76))


def test_bfloat16_is_compared_with_the_float32_of_lightly() -> None:
    as_it_comes, rounded, _ = measured("simclr_bfloat16", RESULTS)
    assert (as_it_comes.ratio, as_it_comes.of.aim, as_it_comes.verdict) == (3.0, 2.8, "met")
    assert rounded.ratio == 93 / 60


def test_targets_are_reported_as_met_or_missed() -> None:
    time, memory, *_ = measured("accumulate", RESULTS)
    assert (time.verdict, memory.verdict) == ("missed", "met")
    held_lightly, held_own, streamed_lightly, streamed_own = measured("data_path_32", RESULTS)
    verdicts = [each.verdict for each in (held_lightly, held_own, streamed_lightly, streamed_own)]
    assert verdicts == ["met", "met", "missed", "missed"]
    assert "2.67 times; aim 5.00 missed" in str(streamed_lightly)


def test_a_quick_run_has_no_verdict() -> None:
    assert not any(each.verdict for each in measured("simclr", RESULTS, is_evaluated=False))


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"rates": {"raycl": [60.0], "encoder": [64.0]}}, "there is no simclr / rates / lightly"),
        ({"rates": {"raycl": [], "lightly": [1.0], "encoder": [64.0]}}, "simclr / rates / raycl is None"),
        ({"rates": {"raycl": [60.0], "lightly": [0.0], "encoder": [64.0]}}, "lightly is 0.0, not a number"),
        ({"rates": {"raycl": ["fast"], "lightly": [1.0], "encoder": [64.0]}}, "raycl is fast"),
        ({"rates": None}, "there is no simclr / rates / raycl"),
        ([], "there is no simclr / rates"),
        (None, "there is no simclr / rates"),
    ],
)
def test_a_missing_side_is_reported(result: Any, message: str) -> None:
    first, *_ = BY_NAME["simclr"].measured({"simclr": result}, is_evaluated=True)
    assert isinstance(first, AbsentError)
    assert message in str(first)


def test_a_side_skipped_for_lack_of_memory_is_reported() -> None:
    result = cells(raycl=(28.0, 11.3), lightly=(138.3, 81.9), plain=(90.1, 86.2))
    result["cells"][4] = {"name": "lightly", "size": 1_024, "dim": 128, "skipped": "needs about 18 GB"}
    *others, time, _ = BY_NAME["nt_xent"].measured({"nt_xent": result}, is_evaluated=True)
    assert "there is no nt_xent / cells / lightly 1024 128 / cpu_ms" in str(time)
    assert sum(isinstance(each, Measured) for each in others) == len(others)


def test_a_number_without_repeated_runs_has_no_spread() -> None:
    assert str(read_number({"a": [1_234.5]}, ("a",))) == "1,234"
    assert str(read_number({"a": spread(10.0)}, ("a",))) == "10 (9-12)"


# Running

SCRIPT = """
import json, sys
from pathlib import Path
assert "--fail" not in sys.argv, "as requested"
path = Path(sys.argv[sys.argv.index("--json") + 1])
runs = path.parent.parent / "runs"
runs.write_text((runs.read_text() if runs.exists() else "") + path.name + "\\n")
print("measured", *sys.argv[1:])
if "--silent" not in sys.argv:
    path.write_text(json.dumps({"rates": {"raycl": [30.0, 20.0, 40.0], "peer": [10.0]}}))
assert "--fail-late" not in sys.argv, "as requested"
"""


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command with three fake benchmarks and returns its status."""
    (tmp_path / "fake.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").touch()
    comparison = Comparison(
        what="fake", unit="rows/s", own=("rates", "raycl"), peer="peer", other=("rates", "peer"), aim=2.5
    )

    def fake(name: str, flags: str = "") -> Benchmark:
        return Benchmark(
            name=name,
            section="Views",
            script=str(tmp_path / "fake.py"),
            flags=flags,
            quick="--small",
            comparisons=[comparison],
        )

    suite = (fake("one", "--data {data}/rows"), fake("two"), fake("three"))
    monkeypatch.setattr(run, "SUITE", suite)

    def call(*words: str, **flags: str) -> int:
        monkeypatch.setattr(
            run, "SUITE", tuple(fake(each.name, flags.get(each.name, each.flags)) for each in suite)
        )
        given = ["--data", str(tmp_path / "data"), "--output", str(tmp_path / "results"), *words]
        monkeypatch.setattr(sys, "argv", ["run.py", *given])
        try:
            run.main()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 1
        return 0

    return call


def runs_of(folder: Path) -> list[str]:
    return (folder / "runs").read_text().replace(".part.json", "").split()


def test_benchmarks_run_in_order_and_print_progress(
    start: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start() == 0
    assert runs_of(tmp_path) == ["one", "two", "three"]
    printed = capfd.readouterr().out
    assert (
        printed.index("[1 of 3, 0 min so far] one: ")
        < printed.index("measured --data")
        < printed.index("[2 of 3")
    )
    assert printed.count("fake: 30 (20-40) rows/s; peer 10; 3.00 times; aim 2.50 met") == 3
    record = json.loads((tmp_path / "results" / "two.record.json").read_text())
    assert {"words", "machine", "commit", "date", "seconds"} == set(record)
    assert not list((tmp_path / "results").glob("*.part.json"))


def test_existing_results_are_kept_unless_again_is_given(start: Callable[..., int], tmp_path: Path) -> None:
    assert start("--only", "two") == 0
    assert start() == 0
    assert runs_of(tmp_path) == ["two", "one", "three"]
    assert start("--only", "three", "--again") == 0
    assert runs_of(tmp_path) == ["two", "one", "three", "three"]


def test_a_quick_run_does_not_replace_a_measurement(start: Callable[..., int], tmp_path: Path) -> None:
    assert start("--only", "two", "--quick") == 0
    assert start("--only", "two") == 0
    assert start("--only", "two") == 0
    assert runs_of(tmp_path) == ["two", "two"]


def test_the_result_of_a_script_run_by_hand_counts(start: Callable[..., int], tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text('{"rates": {"raycl": 3.0, "peer": 1.0}}')
    page = tmp_path / "page.md"
    assert start("--write", str(page)) == 0
    assert runs_of(tmp_path) == ["two", "three"]
    assert "machine and commit not recorded: one\n" in page.read_text()


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--fail", "two failed: status 1"),
        ("--fail-late", "two failed: status 1"),
        ("--silent", "two failed: it wrote no result"),
        ("--data {data}/absent", "two failed: it needs absent in the folder of --data"),
    ],
)
def test_a_failure_is_reported_and_the_other_benchmarks_run(
    start: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str], flags: str, message: str
) -> None:
    assert start(two=flags) == 1
    assert message in capfd.readouterr().err
    assert [name for name in runs_of(tmp_path) if name != "two"] == ["one", "three"]
    assert not (tmp_path / "results" / "two.json").exists()
    assert start() == 0


def test_a_result_with_invalid_json_is_reported(
    start: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "one.json").write_text('{"rates": ')
    assert start("--write", str(tmp_path / "page.md")) == 0
    assert "one.json is not JSON" in capfd.readouterr().err
    assert "- not measured: one\n" in (tmp_path / "page.md").read_text()


def test_an_unknown_name_is_refused_in_one_line(
    start: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert start("--only", "two", "four") == 2
    assert capfd.readouterr().err == "unknown benchmark four; choose one, two, three\n"


# The page


def test_the_page_has_tables_commands_machine_and_pictures(start: Callable[..., int], tmp_path: Path) -> None:
    page = tmp_path / "docs" / "speed.md"
    assert start("--only", "one", "--write", str(page)) == 0
    text = page.read_text()
    assert text.index(BEGIN) < text.index("![") < text.index("## Views") < text.index(END)
    assert "| fake | 30 (20-40) rows/s | peer | 10 rows/s | **3.00** | 2.50, met |" in text
    assert "--data FOLDER/rows --json one.json  # 0.0 min, load " in text
    assert " cores, " in text and "commit " in text
    assert "- not measured: two, three\n" in text
    assert "tried" not in text
    with Image.open(page.parent / "images" / "speed.png") as picture:
        assert picture.convert("RGB").getpixel((0, 0)) == (251, 250, 246)  # a picture with its own background


def test_text_outside_the_markers_is_kept(start: Callable[..., int], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"# Mine\n\nBefore.\n\n{BEGIN}\nold\n{END}\n\nBehind.\n")
    assert start("--quick", "--write", str(page)) == 0
    once = page.read_text()
    assert once.startswith(f"# Mine\n\nBefore.\n\n{BEGIN}\n") and once.endswith(f"{END}\n\nBehind.\n")
    assert "old" not in once
    assert "run at other sizes only, without an aim: one, two, three\n" in once
    assert "aim: " not in once.partition("## Views")[2] and " --small --json two.json" in once
    assert start("--quick", "--write", str(page)) == 0
    assert page.read_text() == once


def test_a_page_without_markers_is_refused_before_any_benchmark_runs(
    start: Callable[..., int], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Mine\n")
    assert start("--write", str(page)) == 2
    assert capfd.readouterr().err.count("\n") == 1
    assert page.read_text() == "# Mine\n"
    assert not (tmp_path / "runs").exists()


def test_the_page_of_the_full_suite_lists_missing_numbers(tmp_path: Path) -> None:
    results = {name: result for name, result in RESULTS.items() if name != "knn"}
    results["nt_xent"] = cells(raycl=(28.0, 11.3), plain=(90.1, 86.2))
    page = tmp_path / "page.md"
    pictures = tmp_path / "results"
    pictures.mkdir()
    for name in ("growth", "knn"):
        Image.new("RGB", (8, 8)).save(pictures / f"{name}.png")
    run.write_page(page, SUITE, results, {name: {} for name in results}, pictures=pictures)
    text = page.read_text()
    assert [line[3:] for line in text.splitlines() if line.startswith("## ")] == [
        title for title in SECTIONS if title != "Neighbors"
    ]
    assert "- not measured: knn\n" in text
    assert "- NT-Xent, 1,024 x 128: there is no nt_xent / cells / lightly 1024 128\n" in text
    assert "**0.74** | 0.77, missed |" in text
    assert (tmp_path / "images" / "page.png").stat().st_size < 150_000
    # The table and picture of each benchmark.
    assert "| forward | 900.0 (31.0%) | 900.0 (31.0%) |" in text
    assert "| wait for rows | 4.0 (0.1%) |" in text and "| encode keys | - | - | - | - |" in text
    assert "Absent: the picture of step_profile (step_profile.png is not among the results)" in text
    assert "| bank | 1,000,000 to 10,000,000 slots | 0.5 to 0.5 | 0.10 | 0 |" in text
    assert "| resnet | raycl, 4 kept | 40.20 (36.18-48.24) | 1.35 | 2,108 | 0.24 | 1.8e-03 |" in text
    assert (
        "| resnet | raycl, BatchNorm over the whole batch | 24.00 (21.60-28.80) | 1.20 | 1,000 | 0.25 |"
        in text
    )
    assert "| transformer | raycl, 4 kept | 20.10 (18.09-24.12) | 1.35 | 2,108 | 0.24 | - |" in text
    assert "| moco_v2 | in an actor | 100 (90-120) | 0.30% | 1.50% |" in text
    assert "| read store | 530 | 8.21 |" in text
    assert text.count("![") == 2 and "](images/page_growth.png)" in text
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"page.png", "page_growth.png"}


def test_every_variant_of_chunked_batches_has_a_title() -> None:
    assert set(CHUNK_SIDES) == {*accumulate.SIDES, *accumulate.BATCHNORM_SIDES}


def test_a_table_without_numbers_in_the_result_is_reported(tmp_path: Path) -> None:
    results = {"growth": RESULTS["growth"] | {"exponents": {}}, "step_profile": {"steps": None}}
    results["bank"] = {"results": [bank_result("moco_v2", 96.2)]}
    page = tmp_path / "page.md"
    run.write_page(page, SUITE, results, {name: {} for name in results}, pictures=tmp_path)
    text = page.read_text()
    assert "Absent: the table of growth (KeyError: 'rows')" in text
    assert "Absent: the table of step_profile (AttributeError: " in text
    assert "Absent: the table of bank (KeyError: 'instance_discrimination')" in text
