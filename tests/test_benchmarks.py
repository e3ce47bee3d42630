"""The command that runs all benchmarks: reading results, running scripts, and writing the page."""

import argparse
import importlib
import json
import math
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image

sys.path.append(str(Path(__file__).parents[1] / "benchmarks"))

import objectives  # pyright: ignore[reportMissingImports]
import partition_error  # pyright: ignore[reportMissingImports]
import product_matching  # pyright: ignore[reportMissingImports]
import run  # pyright: ignore[reportMissingImports]
import scale_model  # pyright: ignore[reportMissingImports]
from comparisons import (  # pyright: ignore[reportMissingImports]
    AbsentError,
    Benchmark,
    Comparison,
    Measured,
)
from measuring import (  # pyright: ignore[reportMissingImports]
    alternate,
    apart,
    in_workers,
    make_parser,
    middle,
    write_figure,
)
from performance_page import BEGIN, END  # pyright: ignore[reportMissingImports]
from suite import SECTIONS, SUITE  # pyright: ignore[reportMissingImports]

from tests.embeddings import make_views

BY_NAME = {benchmark.name: benchmark for benchmark in SUITE}


# Results in the format of the scripts, with fewer rows


def spread(median: float) -> dict[str, float]:
    return {"median": median, "min": 0.9 * median, "max": 1.2 * median}


def result(*lines: dict[str, Any]) -> dict[str, Any]:
    return {"machine": {"cpu": "AMD EPYC"}, "settings": {"workers": 2}, "lines": list(lines)}


def sides(key: str, case: dict[str, Any] | None = None, **figures: float) -> list[dict[str, Any]]:
    """Return a line for each side, with one figure."""
    return [
        (case or {}) | {"side": side.replace("_", " "), key: spread(each)} for side, each in figures.items()
    ]


def losses(**figures: tuple[float, float]) -> dict[str, Any]:
    return result(
        *(
            {"side": side, "size": size, "dim": dim, "cpu_ms": spread(ms), "memory_mb": mb}
            for size, dim in ((256, 128), (1_024, 128), (4_096, 128), (4_096, 512))
            for side, (ms, mb) in figures.items()
        )
    )


def bank_lines(method: str, step_ms: float) -> list[dict[str, Any]]:
    shares = {"waited_percent": spread(0.3), "store_percent": spread(1.5)}
    steps = sides("step_ms", {"method": method} | shares, process=step_ms, actor=1.04 * step_ms)
    return steps + sides("memory_mb", {"method": method}, held=711.0, rows=656.0)


def bank_rates() -> list[dict[str, Any]]:
    us = {"read actor": 5_607, "read store": 530, "read numpy": 747}
    us |= {"write actor": 2_345, "write store": 188, "write numpy": 28}
    return [
        {"method": "instance_discrimination", "side": side, "us": spread(taken)}
        | {"rows_per_s": spread(4_352 / taken * 1e6)}
        for side, taken in us.items()
    ]


CHUNKS = {"whole": (14.9, 8_737), "raycl-1": (22.1, 768), "raycl-4": (20.1, 2_108)}
CHUNKS |= {"gradcache": (21.8, 799), "sentence-transformers": (21.8, 922)}
BATCHNORM_CHUNKS = {"whole-batchnorm": (10.0, 4_000), "lockstep": (12.0, 1_000)}
TRAINED = {"raycl": (1_953.0, 2_929.0), "sentence-transformers": (570.0, 3_104.0)}
MOVED = {"gather": 1.57e6, "gather's gradient": 3.1e6, "parameters' gradient": 1.4e7}
LAYER = {"shape": "256 x 64 x 32 x 32", "layout": "channels_last"}
GROWN = {"rows": (100_000, 1_000_000), "queue": (262_144, 1_048_576)}
GROWN |= {"bank": (1_000_000, 10_000_000), "batch": (16_384, 65_536)}
RATE, IMAGES = "samples_per_second", "images_per_second"
RESULTS: dict[str, Any] = {
    "simclr": result(*sides(RATE, raycl=62.0, lightly=31.0, encoder=64.0)),
    "simclr_bfloat16": result(*sides(RATE, raycl=93.0, lightly=60.0, encoder=100.0)),
    "moco_v2": result(*sides(RATE, raycl=60.0, lightly=40.0, encoder=64.0)),
    "moco_v2_bfloat16": result(*sides(RATE, raycl=93.0, lightly=60.0, encoder=100.0)),
    "pairs": result(
        *(
            {"encoder": encoder, "side": side, RATE: spread(rate), "workers_mb": spread(mb)}
            for encoder in ("bag_of_subwords", "transformer")
            for side, (rate, mb) in TRAINED.items()
        )
    ),
    "data_path_32": result(*sides(IMAGES, held=9e3, stream=4e3, lightly=1.5e3, own_views=5e3, decoding=2e4)),
    "data_path_224": result(*sides(IMAGES, held=500.0, stream=400.0, lightly=150.0, own_views=450.0)),
    "augment": result(
        *(
            {"size": size, "side": side, "us_per_view": spread(us)}
            for size in (32, 96, 224)
            for side, us in {"raycl": 40, "lightly SimCLRTransform": 600, "torchvision v2, PIL": 800}.items()
        )
    ),
    "nt_xent": losses(raycl=(28.0, 11.3), lightly=(138.3, 81.9), plain=(90.1, 86.2)),
    "bidirectional": losses(raycl=(11.8, 6.4), open_clip=(30.2, 21.1), plain=(23.9, 23.8)),
    "hinge": losses(raycl=(8.8, 4.3), plain=(25.8, 30.0)),
    "queue_loss": losses(raycl=(9.8, 3.3), lightly=(35.1, 39.2), plain=(23.8, 43.3)),
    "batchnorm": result(
        *(
            line
            for dtype in ("float32", "bfloat16")
            for line in sides("cpu_ms", LAYER | {"dtype": dtype}, nn=119.87, synchronized=122.11)
        )
    ),
    "accumulate": result(
        *(
            {
                "network": network,
                "side": side,
                "cpu_s": spread(times * seconds),
                "memory_mb": mb,
                "error": error,
            }
            for network, times, error in (("resnet", 2, 1.8e-3), ("transformer", 1, None))
            for side, (seconds, mb) in (CHUNKS | (BATCHNORM_CHUNKS if network == "resnet" else {})).items()
        )
    ),
    "knn": result(
        *(
            {"side": side, "rows": 50_000, "cpu_s": seconds, "memory_mb": mb, "top1": 0.7991}
            for side, seconds, mb in (("raycl", 5.14, 205), ("scikit-learn", 10.44, 1_566))
        )
    ),
    "bank": result(
        *bank_lines("moco_v2", 96.2), *bank_lines("instance_discrimination", 140.0), *bank_rates()
    ),
    "step_profile": result(
        *(
            {"side": recipe, "data": 4.0, "forward": 900.0, "backward": 1_800.0, "wall": 2_900.0}
            for recipe in ("simclr", "moco_v2", "instance_discrimination", "two_tower")
        )
    ),
    "startup": result(*sides("seconds", accepted=9.0, worker_up=9.0, first_step=9.0)),
    "growth": result(
        *(
            {"side": kind, "size": size, "seconds": size / 2e6, "memory_mb": 12.0}
            for kind, sizes in GROWN.items()
            for size in sizes
        )
    ),
    "large_batch": result(
        {"side": "training", "wall_s": 137.5, RATE: 477.0, "memory_mb": 7_900.0},
        {"side": "nt_xent", "wall_s": 68.8, "memory_mb": 168.0},
        {"side": "info_nce", "wall_s": 6.0, "memory_mb": 168.0},
    ),
    "scale_training": result(
        *({"workers": number, "side": side} | MOVED for number in (1, 4) for side in ("measured", "model"))
    ),
}


def measured(name: str, results: dict[str, Any], *, is_evaluated: bool = True) -> list[Measured]:
    found = list(BY_NAME[name].measured(results, is_evaluated=is_evaluated))
    assert not [line for line in found if isinstance(line, AbsentError)]
    return [line for line in found if isinstance(line, Measured)]


# Reading


def test_names_sections_and_scripts_of_the_suite_are_consistent() -> None:
    assert len(BY_NAME) == len(SUITE)
    assert {benchmark.section for benchmark in SUITE} == set(SECTIONS)
    assert all((run.FOLDER / benchmark.script).exists() for benchmark in SUITE)
    assert {each.other_of for benchmark in SUITE for each in benchmark.comparisons} <= {None, *BY_NAME}


def documented_commands() -> list[str]:
    """Return the commands of benchmarks in the documents, with their flags."""
    root = run.FOLDER.parent
    pages = [root / "README.md", root / "CHANGELOG.md", *sorted((root / "docs").rglob("*.md"))]
    found = [
        re.findall(r"python benchmarks/(\w+\.py[^\n`#]*)", page.read_text().replace("\\\n", " "))
        for page in pages
    ]
    return sorted({command.strip() for commands in found for command in commands})


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], argparse.Namespace]:
    """Return a function that reads a script's words by its own parser, and goes no further."""
    parse = argparse.ArgumentParser.parse_args

    def read(words: list[str]) -> argparse.Namespace:
        found: list[argparse.Namespace] = []

        def stop(parser: argparse.ArgumentParser, *_: Any) -> Any:
            found.append(parse(parser, words[1:]))
            raise KeyboardInterrupt

        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
        with pytest.raises(KeyboardInterrupt):
            importlib.import_module(Path(words[0]).stem).main()
        return found[0]

    return read


@pytest.mark.parametrize("name", BY_NAME)
def test_scripts_accept_the_flags_of_the_suite(
    name: str, parsed: Callable[[list[str]], argparse.Namespace]
) -> None:
    words = [word.format(data="d", output="o") for word in BY_NAME[name].words(quick=True)]
    assert parsed([*words, "--json", "x"]).json == Path("x")


@pytest.mark.parametrize("command", documented_commands())
def test_scripts_accept_the_commands_of_the_documents(
    command: str, parsed: Callable[[list[str]], argparse.Namespace]
) -> None:
    parsed(shlex.split(command.replace(" --precision P", " --precision bfloat16")))


@pytest.mark.parametrize("name", BY_NAME)
def test_every_comparison_is_found_in_a_result(name: str) -> None:
    for headline in measured(name, RESULTS):
        assert middle(headline.own) > 0
        assert (headline.ratio is None) == (headline.of.peer == "")


def test_higher_rates_and_lower_times_win() -> None:
    lightly, encoder = measured("simclr", RESULTS)
    assert (lightly.own, lightly.other) == (spread(62.0), spread(31.0))
    assert (lightly.ratio, lightly.verdict) == (2.0, "met")
    assert encoder.ratio == 62 / 64
    time, memory = measured("queue_loss", RESULTS)[0::2]
    assert time.ratio == pytest.approx(35.1 / 9.8)
    assert memory.ratio == pytest.approx(39.2 / 3.3)


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


LIGHTLY_PLACE = "simclr / lightly / samples_per_second"


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (result(*sides(RATE, raycl=60.0)), f"there is no {LIGHTLY_PLACE}"),
        (result(*sides(RATE, raycl=60.0, lightly=0.0)), f"{LIGHTLY_PLACE} is 0.0, not a number above 0"),
        (result(*sides(RATE, raycl=6.0), {"side": "lightly", RATE: "fast"}), f"{LIGHTLY_PLACE} is fast"),
        (result(*sides(RATE, raycl=6.0), {"side": "lightly", RATE: {}}), f"there is no {LIGHTLY_PLACE}"),
        ({"lines": None}, "there is no simclr / raycl"),
        ([], "there is no simclr / raycl"),
        (None, "there is no simclr / raycl"),
    ],
)
def test_a_missing_side_is_reported(found: Any, message: str) -> None:
    first, *_ = BY_NAME["simclr"].measured({"simclr": found}, is_evaluated=True)
    assert isinstance(first, AbsentError)
    assert message in str(first)


def test_a_side_skipped_for_lack_of_memory_is_reported() -> None:
    found = losses(raycl=(28.0, 11.3), lightly=(138.3, 81.9), plain=(90.1, 86.2))
    found["lines"][4] = {"side": "lightly", "size": 1_024, "dim": 128, "skipped": "needs about 18 GB"}
    *others, time, _ = BY_NAME["nt_xent"].measured({"nt_xent": found}, is_evaluated=True)
    assert "there is no nt_xent / lightly 1024 128 / cpu_ms" in str(time)
    assert sum(isinstance(each, Measured) for each in others) == len(others)


def test_a_figure_has_three_digits_and_a_spread_if_runs_were_repeated() -> None:
    assert write_figure(1_234.5) == "1,234"
    assert write_figure(spread(10.0)) == "10 (9-12)"
    assert write_figure({"median": 0.01234, "min": 0.01234, "max": 0.01234}) == "0.0123"


# The harness


def test_sides_take_turns_and_warmup_does_not_count() -> None:
    calls: list[str] = []

    def side(name: str) -> Callable[[], dict[str, float]]:
        return lambda: (calls.append(name), {"s": float(len(calls))})[1]

    lines = alternate({"a": side("a"), "b": side("b")}, 2, warmup=1)
    assert calls == ["a", "b"] * 3
    assert lines[0] == {"side": "a", "s": {"median": 4.0, "min": 3.0, "max": 5.0}}


def test_a_function_runs_apart_in_another_process_with_its_arguments() -> None:
    assert apart(scale_model.gather_bytes, 2, 8, 4, num_threads=1) == scale_model.gather_bytes(2, 8, 4)
    with pytest.raises(SystemExit, match=r"(?s)scale_model\.gather_bytes 0 8 4 failed:.*ZeroDivisionError"):
        apart(scale_model.gather_bytes, 0, 8, 4)


def test_workers_run_at_once_and_answer_by_rank() -> None:
    assert in_workers(divmod, 2, 3) == [(0, 0), (0, 1)]


def test_flags_follow_from_their_defaults() -> None:
    flags: dict[str, Any] = {"kind": ("a", "b"), "sides": ["x", "y"], "sizes": [1, 2], "quick": False}
    parser = make_parser("What.", data=str, name=None, num_steps=3, **flags)
    options = parser.parse_args(["--data", "d", "--num-steps", "4", "--sizes", "7", "--kind", "b"])
    assert (options.data, options.name, options.num_steps, options.sizes) == ("d", None, 4, [7])
    assert (options.kind, options.sides, options.quick, options.json) == ("b", ["x", "y"], False, None)
    for wrong in (["--kind", "c"], ["--sides", "z"], ["--sizes", "x"], []):
        with pytest.raises(SystemExit):
            parser.parse_args(["--data", "d", *wrong] if wrong else [])


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
    rate = {"median": 30.0, "min": 20.0, "max": 40.0}
    path.write_text(json.dumps({"lines": [{"side": "raycl", "rate": rate}, {"side": "peer", "rate": 10.0}]}))
assert "--fail-late" not in sys.argv, "as requested"
"""


@pytest.mark.parametrize("ways", [["mixed + mined"], ["mixed + mined", "mixed"]])
def test_a_way_with_mined_negatives_trains_the_run_that_finds_them(
    ways: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train(_config: Any, *, data: str, output: str, resume: bool = False, **_: Any) -> Any:
        Path(output).mkdir(exist_ok=resume)
        trained.append((Path(data).stem, Path(output).name))
        return SimpleNamespace(seconds=1.0)

    def mine(run: str, _data: str, output: str, **_: Any) -> None:
        assert Path(run).is_dir()
        Path(output).touch()

    trained = list[tuple[str, str]]()
    monkeypatch.setattr(product_matching.raycl, "train", train)
    monkeypatch.setattr(product_matching, "mine_negatives", mine)
    for way in ways:
        product_matching.train_way(way, tmp_path, {})
    assert trained[:2] == [("train", "mixed"), ("mined", "mixed-mined")]


def test_the_cost_of_every_objective_can_be_measured() -> None:
    values = {name: objectives.build_step(name, "raycl", 64, 16)() for name in objectives.CASES}
    assert all(map(math.isfinite, values.values())), values
    assert len(set(values.values())) > len(values) / 2


def test_errors_of_partition_functions_are_against_the_mean_over_all_views_of_other_samples() -> None:
    views, stored = (
        [each.double() for each in make_views(32, 6, noise=0.5)],
        torch.linspace(0, 1, 10)[:, None],
    )
    found = partition_error.errors(*views, stored, batch_size=8, temperature=0.2, momentum=0.3)

    def mean(row: int, others: range) -> float:
        weights = [
            math.exp(float(own[row] @ other[k]) / 0.2)
            for own in views
            for other in views
            for k in others
            if k != row
        ]
        return sum(weights) / len(weights)

    for row in range(10):
        true, of_batch, u = (
            mean(row, range(32)),
            mean(row, range(row // 8 * 8, row // 8 * 8 + 8)),
            stored[row].exp(),
        )
        assert found["stored"][row] == pytest.approx(float((u / true).log()), abs=1e-5)
        assert found["batch"][row] == pytest.approx(math.log(of_batch / true), abs=1e-5)
        assert found["both"][row] == pytest.approx(float(((0.3 * u + 0.7 * of_batch) / true).log()), abs=1e-5)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Return a function that runs the command with three fake benchmarks and returns its status."""
    (tmp_path / "fake.py").write_text(SCRIPT)
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "rows").touch()
    comparison = Comparison(
        what="fake",
        unit="rows/s",
        own=({"side": "raycl"}, "rate"),
        peer="peer",
        other=({"side": "peer"}, "rate"),
        aim=2.5,
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
    (tmp_path / "results" / "one.json").write_text('{"lines": []}')
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
    (tmp_path / "results" / "one.json").write_text('{"lines": ')
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
    results["nt_xent"] = losses(raycl=(28.0, 11.3), plain=(90.1, 86.2))
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
    assert "- NT-Xent, 1,024 x 128: there is no nt_xent / lightly 1024 128 / cpu_ms\n" in text
    assert "**0.74** | 0.77, missed |" in text
    assert (tmp_path / "images" / "page.png").stat().st_size < 150_000
    # The table and picture of each benchmark.
    assert "| forward | 900.0 (31.0%) | 900.0 (31.0%) |" in text
    assert "| wait for rows | 4.0 (0.1%) |" in text and "| encode keys | - | - | - | - |" in text
    assert "Absent: the picture of step_profile (step_profile.png is not among the results)" in text
    assert "| bank | 1,000,000 to 10,000,000 slots | 0.5 to 5 | 1.00 | 0 |" in text
    assert "| resnet | raycl, 4 kept | 40.2 (36.2-48.2) | 1.35 | 2,108 | 0.24 | 1.8e-03 |" in text
    assert "| resnet | raycl, BatchNorm over the whole batch | 24 (21.6-28.8) | 1.20 | 1,000 | 0.25 |" in text
    assert "| transformer | raycl, 4 kept | 20.1 (18.1-24.1) | 1.35 | 2,108 | 0.24 | - |" in text
    assert "| moco_v2 | in an actor | 100 (90-120) | 0.30% | 1.50% |" in text
    assert "| read store | 530 (477-636) | 8.21 |" in text
    assert text.count("![") == 2 and "](images/page_growth.png)" in text
    assert {path.name for path in (tmp_path / "images").iterdir()} == {"page.png", "page_growth.png"}


def test_a_table_without_numbers_in_the_result_is_reported(tmp_path: Path) -> None:
    results = {"growth": result({"side": "rows"}), "step_profile": {"lines": None}, "bank": {}}
    page = tmp_path / "page.md"
    run.write_page(page, SUITE, results, {name: {} for name in results}, pictures=tmp_path)
    text = page.read_text()
    assert "Absent: the table of growth (KeyError: 'size')" in text
    assert "Absent: the table of step_profile (TypeError: " in text
    assert "Absent: the table of bank (KeyError: 'lines')" in text
