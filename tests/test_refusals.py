"""Invalid input is refused before torch and Ray are imported, and before a library uses the network."""

import json
import os
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import raycl
from raycl.config.overrides import config_to_yaml, override
from raycl.data.columns import ColumnNames
from raycl.data.discovery import check_output_is_outside, find_source
from raycl.data.sources import Source
from raycl.errors import ConfigError, DataError, RayclError
from raycl.evaluation.classification import evaluate
from raycl.gpus import accelerators, are_missing, check_accelerator, check_bfloat16
from raycl.recipes import recipe
from raycl.storage import Place
from raycl.training import launch
from raycl.training.launch import _check_length, _read_data, _report_skipped, _report_unused, train
from raycl.training.preflight import check_negatives, check_pairs, column_names, validate_run
from tests.images import encode, write_digits

TRAIN = "train simclr --output new --batch-size 32"
DIGITS = f"{TRAIN} --data digits.parquet"
EVALUATE = "evaluate knn --run images --train digits.parquet --test digits.parquet"
EMBED = "embed --run images --data digits.parquet --output new"
GUIDED = (
    "train two_tower --output new --batch-size 2 "
    "--set negatives.guide.query=pairs --set negatives.guide.document=pairs"
)
REFUSED = {
    f"{TRAIN} --data gs://bucket/x": "cannot use the address 'gs://bucket/x': raycl does not support gs://",
    f"{TRAIN} --data s3://": "cannot use the address 's3://': it has no bucket; give a local path or s3://",
    f"{TRAIN} --data s3:///digits": "it has no bucket",
    f"{TRAIN} --data missing": "there is nothing at",
    f"{TRAIN} --data=": "an address is empty; give a file or a folder, such as . for the working folder",
    f"{DIGITS} --output=": "an address is empty",
    f"{DIGITS} --output hdfs://here/x": "raycl does not support hdfs://",
    f"{DIGITS} --output s3:///x": "it has no bucket",
    f"{DIGITS} --output earlier": "holds an earlier run; give another output, or continue it with --resume (resume=True in Python)",
    f"{DIGITS} --batch-size 128": "larger than the 100 rows to train on; lower --batch-size or give more data",
    "replay missing --step 1": "missing holds no run: there is no config.yaml",
    "replay missing --find nan": "missing holds no run: there is no config.yaml",
    "certify missing": "missing holds no run: there is no config.yaml",
    "train supcon --data unlabeled --output new --set data.image_size=16": "loss supcon needs labels, but",
    "train simclr --data splits --output new --batch-size 2": "splits holds a data set in 2 splits; give --data ",
    "train simclr --data splits/train --output splits/train/new --batch-size 2": "the output splits/train/new lies in the "
    "data at splits/train, which could not be read again beside other files; give an --output outside of that folder",
    "train simclr --data splits/train --output splits/train/old --batch-size 2": "old holds an earlier run",
    "embed --run images --data splits/train --output splits/train": "the output splits/train lies in the data at splits/train, ",
    f"{DIGITS} --set encoder.name=resnet19": "own; did you mean resnet18?",
    f"{DIGITS} --gpu --workers 2": "--gpu takes one GPU per worker: 2 needed, but the cluster has 0",
    "train clip --data captions --output new --set text_encoder.name=bert "
    "--set data.image_size=16": "unknown text_encoder.name 'bert'; there are transformer",
    "train simcse --data captions --output new --set encoder.name=resnet18": "unknown encoder.name 'resnet18'",
    "train two_tower --data weights --output new --set data.columns.weight=weight": "labels ('label'), so that rows become pairs, which have no weight",
    f"{GUIDED} --data pairs": "negatives.guide finds embeddings by id, and the data have no query_id; name the",
    "train two_tower --data ids --output new --batch-size 2 --set text.corpus=missing": "there is nothing at",
    "train two_tower --data ids --output new --batch-size 2 --set text.corpus=unlabeled": "unlabeled has none of "
    "the columns text, query, document; it has image: rename its column of texts to text",
    f"{GUIDED} --data ids --set negatives.guide.query=earlier": "earlier has no parquet file (1 others); give",
    f"{GUIDED} --data ids --set negatives.guide.query=missing": "there is nothing at",
    f"{GUIDED} --data ids": "no column 'query_id'; it has query, document: write it by `raycl embed",
    f"{GUIDED} --data ids --set data.cache=stream --set stages.0.logq_correction=simple": "logq_correction and "
    "negatives.guide need the ids of all rows before training, which streamed data do not have; set "
    "data.cache=materialize, or remove them",
    f"{GUIDED} --data ids --set data.cache=stream": "negatives.guide needs the ids of all rows before training, which",
    "train two_tower --data ids --output new --batch-size 2 --set stages.0.logq_correction=simple "
    "--set data.cache=stream": "logq_correction needs the ids of all rows before training, which streamed data",
    "train clip --data captions --output new --batch-size 2 --set negatives.mined.num=1 "
    "--set data.cache=stream --set data.image_size=16": "negatives.mined embeds all images again and again, which streamed data do not keep; set",
    "train two_tower --data ids --output new --batch-size 2 --set negatives.mined.num=1 --set data.cache=stream --set "
    "negatives.explicit=false --set negatives.in_batch=false "
    "--set stages.0.loss=info_nce": "streamed data before its first table, and negatives.in_batch false leaves no others",
    "train two_tower --data ids --output new --batch-size 2 --set negatives.mined.num=1 --set data.cache=stream --set "
    "negatives.in_batch=false --set stages.0.loss=info_nce": "negatives.in_batch false leaves only explicit negatives before "
    "the first table of negatives.mined, and the data have no column of them (only query, document, query_id, document_id)",
    "train two_tower --data pairs --output new --batch-size 2 --set negatives.in_batch=false --set data.cache=stream "
    "--set stages.0.loss=info_nce": "leaves only explicit negatives, and the data have no column of them (only query, document); name",
    "train two_tower --data ids --data pairs --output new --batch-size 2 --set "
    "negatives.mined.num=1": "negatives.mined searches the documents of one data set, and there are 2; give one",
    "demo --output earlier_demo": "holds an earlier demo",
    "demo --output demo --epochs 0": "stages.0.epochs",
    "demo --output demo --workers 0": "Invalid value for '--workers': Input should be greater than or equal to 1",
    f"{EMBED} --set data.columns.image=0": "data.columns.image must be the name of a column, got 0; quote a name: "
    "--set 'data.columns.image=\"NAME\"'",
    "train --data digits.parquet --output new": "give a recipe, or --like with one of lightly:simclr, ",
    "train --like lightly:magic --data digits.parquet --output new": "unknown configuration 'lightly:magic' of "
    "another library; there are lightly:simclr, open_clip:vit-b-32, st:mnrl",
    "train clip --like lightly:simclr --data digits.parquet --output new": "trains recipe simclr, got recipe clip; ",
    EVALUATE.replace("knn", "magic"): "unknown measure 'magic'; choose knn, linear, retrieval or sts",
    "evaluate knn --run images --test digits.parquet": "needs --train",
    f"{EVALUATE} --run nowhere": "found no encoder at nowhere",
    f"{EVALUATE} --run file:///run": "raycl does not support file://",
    "evaluate knn --run images --train missing --test digits.parquet": "there is nothing at",
    f"{EVALUATE} --train digits.parquet": "--train is given 2 times, and evaluate takes one data set; run it once for each",
    "evaluate knn --run images --train digits.parquet --test missing": "there is nothing at",
    f"{EVALUATE} --set nonsense=1": "unknown key nonsense",
    f"{EVALUATE} --json gs://bucket/x": "raycl does not support gs://",
    f"{EVALUATE} --gpu": "--gpu needs a GPU",
    "evaluate retrieval --run images --test digits.parquet --set queries=missing": "there is nothing at",
    "evaluate sts --run images --test missing": "there is nothing at",
    f"{EMBED} --run nowhere": "found no encoder at nowhere",
    "embed --run images --data missing --output new": "there is nothing at",
    f"{EMBED} --data splits/train": "--data is given 2 times, and embed takes one data set; run it once for each",
    f"{DIGITS} --set seed=": "--set seed: '' is no value; give null for none",
    f"{DIGITS} --set seed=010": "seed: input should be a valid integer",
    f"{EMBED} --output images": "images exists already; give another --output",
    f"{EMBED} --side left": "unknown side 'left'",
    f"{EMBED} --gpu": "--gpu needs a GPU",
    f"{EMBED} --index annoy": "cannot write an index of kind 'annoy'; the only one is faiss",
    "mine --run images --data digits.parquet --output images": "exists already",
    "mine --run images --data missing --output new": "there is nothing at",
    "mine --run images --data missing --output new.jsonl": "the output new.jsonl would hold parquet, and be read as another "
    "format by its ending; end its name in .parquet",
    "mine --run images --data digits.parquet --output new --num-negatives 0": "cannot mine 0 negatives",
    "mine --run images --data digits.parquet --output new --max-relative-score 2": "a fraction up to 1",
    "export --run images --output new --to keras": "cannot export to 'keras'",
    "export --run nowhere --output new": "found no encoder at nowhere",
    "export --run images --output images": "exists already",
    "export --run images --output new --side left": "unknown side 'left'",
}
COMMANDS = """if True:
    import contextlib, io, json, sys, time
    from raycl.cli.main import main
    for line in sys.stdin.read().splitlines():
        began, sys.argv = time.monotonic(), ["raycl", *line.split()]
        with contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                main()
            except SystemExit as ending:
                status = ending.code
        loaded = sorted({"torch", "ray"} & set(sys.modules))
        print(json.dumps([status, said.getvalue(), loaded, time.monotonic() - began]))
"""


@pytest.fixture(scope="module")
def refusals(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Run all commands in one process; return status, message, imported libraries and seconds of each."""
    folder = tmp_path_factory.mktemp("refusals")
    write_digits(folder / "digits.parquet", 100)
    pairs: dict[str, list[Any]] = {"query": ["a", "b"], "document": ["c", "d"]}
    ids = {"query_id": [1, 2], "document_id": [3, 4]}
    for name, table in (
        ("pairs", pairs),
        ("ids", pairs | ids),
        ("unlabeled", {"image": [b"x"]}),
        ("weights", pairs | {"label": [1, 0], "weight": [1, 2]}),
    ):
        pq.write_table(pa.table(table), folder / name)
    for name, content in (
        ("earlier/config.yaml", config_to_yaml(recipe("simclr"))),
        ("earlier_demo/run/config.yaml", config_to_yaml(recipe("simclr"))),
        ("splits/train/old/config.yaml", config_to_yaml(recipe("simclr"))),
        ("images/encoder.json", "{}"),
    ):
        (folder / name).parent.mkdir(parents=True)
        (folder / name).write_text(content)
    for name in ("train/a.png", "train/b.png", "val/c.png"):
        (folder / "splits" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "splits" / name).write_bytes(encode(np.zeros((16, 16, 3), np.uint8)))
    hidden = {"CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(__file__).parent.parent)}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"} | hidden
    done = subprocess.run(
        [sys.executable, "-c", COMMANDS],
        input="\n".join(REFUSED),
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert not (folder / "new").exists()
    return dict(zip(REFUSED, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.parametrize("command", REFUSED)
def test_invalid_input_is_refused_in_one_line_without_importing_torch_or_ray(
    command: str, refusals: dict[str, list[Any]]
) -> None:
    status, message, libraries, seconds = refusals[command]
    assert (status, message.count("\n"), libraries) == (2, 1, []), message
    assert REFUSED[command] in message
    assert seconds < 20  # a library that uses the network takes minutes


def test_mined_negatives_of_rows_in_memory_need_no_column_of_negatives() -> None:
    mined = {"negatives.mined.num": 1, "negatives.in_batch": False, "stages.0.loss": "info_nce"}
    config = raycl.override(recipe("two_tower"), mined)
    columns = column_names(config).found_in(["query", "document"], where="the test")
    check_pairs(config, columns)
    with pytest.raises(DataError, match="before the first table"):
        check_negatives(config, columns, streamed=True)  # as data.cache=auto may decide later


def test_a_data_set_is_listed_once_for_both_image_size_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed: list[str] = []

    def find(uri: str, columns: ColumnNames) -> Source:
        listed.append(uri)
        return find_source(uri, columns)

    for module in ("raycl.data.discovery", "raycl.training.preflight"):
        monkeypatch.setattr(f"{module}.find_source", find)
    monkeypatch.setattr("raycl.training.launch.train_validated", lambda run, **_: run.sources[0])
    data = str(write_digits(tmp_path / "digits.parquet", 40))
    source: Any = raycl.train("simclr", data=data, output=str(tmp_path / "run"), batch_size=8)
    assert source.num_rows == 40
    assert listed == [data]


def test_python_functions_refuse_the_same_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = str(write_digits(tmp_path / "digits.parquet", 40))
    with pytest.raises(ConfigError, match="unknown measure 'foo'"):
        evaluate("foo", run="nowhere", train=digits, test=digits)  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr("raycl.training.launch.train_validated", lambda *_, **__: "admitted")
    config = recipe("simclr", image_size=16)
    config = config.model_copy(update={"encoder": config.encoder.model_copy(update={"name": "mine"})})
    output = str(tmp_path / "run")
    with pytest.raises(RayclError, match="unknown encoder.name 'mine'"):
        train(config, data=[digits], output=output)
    # A module of the same name replaces the function.
    monkeypatch.setattr("raycl.training.preflight.check_sizes", lambda *_: None)
    assert train(config, data=[digits], output=output, encoder=object()) == "admitted"  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    ("output", "is_inside"),
    [
        ("s3://bucket/images/run", True),
        ("s3://bucket/images/?scheme=http", True),
        ("s3://bucket/images-run", False),
        ("s3://bucket", False),
        ("images/cat/run", True),
        ("images/../run", False),
        ("images/.runs/a", False),
        ("s3://bucket/images/.runs/a", False),
        ("link/run", True),
        ("file/run", False),
    ],
)
def test_an_output_inside_a_folder_of_data_is_refused(
    output: str, is_inside: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    (tmp_path / "link").symlink_to("images")
    monkeypatch.setattr("raycl.storage.Place.is_folder", lambda place: place.name != "file")
    data = ["file", "s3://bucket/images?scheme=http", "images"]
    with pytest.raises(ConfigError, match="lies in the data at") if is_inside else nullcontext():
        check_output_is_outside(output, data)


def test_only_a_local_ray_is_known_to_have_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setitem(sys.modules, "ray", None)
    assert are_missing(None)
    assert are_missing("local")
    assert not are_missing("10.0.0.1:6379")
    monkeypatch.setenv("RAY_ADDRESS", "auto")
    assert not are_missing(None)


@pytest.mark.parametrize(
    ("autoscaling", "says"),
    [
        (False, "the cluster has no CPU; add a node with CPUs, or set autoscaling=true if"),
        (True, "none came"),
    ],
)
def test_a_cluster_without_cpus_is_refused_before_the_data_are_read(
    autoscaling: bool, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise ConfigError("none came")

    monkeypatch.setattr("raycl.ray_runtime.ray.cluster_resources", dict)
    monkeypatch.setattr("raycl.ray_runtime.wait_for_cpu", refuse)
    read = MagicMock()
    for name in ("_check_towers", "connect_cluster", "prestart_controller", "start_coordinator"):
        monkeypatch.setattr(launch, name, MagicMock())
    monkeypatch.setattr(launch, "GracefulShutdown", MagicMock())
    monkeypatch.setattr(launch, "DataModule", read)
    config = override(recipe("simclr", image_size=16), {"autoscaling": autoscaling})
    with (
        pytest.raises(ConfigError, match=says),
        validate_run(config, output=str(tmp_path / "run"), resume=False) as run,
    ):
        launch.train_validated(run, quiet=True)
    read.assert_not_called()


@pytest.mark.parametrize(
    ("wanted", "have", "says"),
    [
        ("H100", ["A100", "T4"], "no node of the cluster has accelerator 'H100', it has A100, T4; choose"),
        ("h100", [], "it has none; choose one of these, remove accelerator, or set autoscaling=true"),
    ],
)
def test_an_accelerator_that_no_node_has_is_refused(wanted: str, have: list[str], says: str) -> None:
    check_accelerator(None, have)
    check_accelerator(wanted, [*have, wanted])
    with pytest.raises(ConfigError, match=says):
        check_accelerator(wanted, have)


def test_accelerators_are_found_in_the_resources_of_the_cluster() -> None:
    assert accelerators(["CPU", "GPU", "accelerator_type:T4", "accelerator_type:A100", "node:1"]) == [
        "A100",
        "T4",
    ]


def test_bfloat16_is_refused_if_no_gpu_supports_it() -> None:
    for types in ([], ["H100"], ["T4", "A100"]):
        check_bfloat16(types)
    with pytest.raises(ConfigError, match="precision=bfloat16 needs GPUs that support it, got T4, V100; set"):
        check_bfloat16(["T4", "V100"])


@pytest.mark.parametrize(
    ("num_train", "line"),
    [
        (
            [360],
            "each epoch leaves out 104 of 360 rows, other ones each time; a stages.0.batch_size of about 180 instead of",
        ),
        (
            [1_200],
            "each epoch leaves out 176 of 1,200 rows, other ones each time; a stages.0.batch_size of about 240 ",
        ),
        ([2_800], None),  # 240 rows are less than a tenth
        ([512], None),
        ([1_030], None),  # 6 are left
        ([360, 360], None),  # batches of several data sets are counted by their weights
    ],
)
def test_a_new_run_says_how_many_rows_no_batch_of_an_epoch_has(
    num_train: list[int], line: str | None, tmp_path: Path
) -> None:
    lines, output = list[str](), Place(str(tmp_path))
    config = override(recipe("simclr"), {"stages.0.batch_size": 256})
    _report_unused(config, output, num_train, lines.append)
    assert [each[: len(line or "")] for each in lines] == ([line] if line else [])
    (output / "config.yaml").write_text("")  # a resumed run keeps its batch size
    _report_unused(config, output, num_train, lines.append)
    assert len(lines) == bool(line)


def test_the_batch_size_that_uses_more_rows_fits_the_workers(tmp_path: Path) -> None:
    lines, output = list[str](), Place(str(tmp_path))
    config = override(recipe("simclr"), {"stages.0.batch_size": 256, "workers": 8})
    _report_unused(config, output, [360], lines.append)
    assert "a stages.0.batch_size of about 176 instead of 256" in lines[0]
    _report_unused(override(config, {"stages.0.batch_size": 8}), output, [10], lines.append)
    assert len(lines) == 1  # no smaller batch has a row for each worker


def test_a_run_says_which_files_and_labels_it_ignores() -> None:
    lines = list[str]()
    source = Source(
        uri="sentences",
        kind="parquet",
        fragments=(),
        columns=ColumnNames(image=None, text="text"),
        classes=None,
        has_labels=False,
        ignored=((".md", 2),),
        ignored_label="double",
    )
    run: Any = SimpleNamespace(config=recipe("simcse"), sources=(source,), corpus=None, evaluation=None)
    data: Any = SimpleNamespace(can_be_evaluated=False)
    _report_skipped(data, run, lines.append)
    assert lines == [
        "files not read in sentences: 2 .md",
        "ignored the column 'label' of sentences: it holds double, not integers or text",
        "the samples have no labels: no periodic kNN; evaluation.data may name labeled ones",
    ]
    run.corpus, lines[:] = replace(source, uri="documents", ignored_label=""), []
    _report_skipped(data, run, lines.append)
    assert "files not read in documents: 2 .md" in lines


def test_a_run_is_not_resumed_with_fewer_steps_than_it_has_made(tmp_path: Path) -> None:
    output, config = Place(str(tmp_path)), recipe("simclr", image_size=32)
    two_epochs = override(config, {"stages.0.epochs": 2, "stages.0.batch_size": 32})
    _check_length(two_epochs, output, [100])
    (output / "checkpoints/step-00000006/state.pt").write_text("")
    _check_length(two_epochs, output, [100])
    with pytest.raises(
        ConfigError, match="has made 6 steps, and --resume would train for 3; repeat its --epochs"
    ):
        _check_length(override(two_epochs, {"stages.0.epochs": 1}), output, [100])
    # The steps of a stage that --resume appends do not replace those of a stage that it shortens.
    (output / "config.yaml").write_text(config_to_yaml(two_epochs))
    longer = override(two_epochs, {"stages.1.epochs": 9})
    _check_length(longer, output, [100])
    with pytest.raises(
        ConfigError, match=r"6 steps, and --resume would train for 3 before stages\.1; repeat"
    ):
        _check_length(override(longer, {"stages.0.epochs": 1}), output, [100])


def test_a_stream_is_not_resumed_with_fewer_steps_than_all_its_rows_allow(tmp_path: Path) -> None:
    config = override(recipe("simclr", image_size=32), {"stages.0.batch_size": 10, "data.cache": "stream"})
    run: Any = SimpleNamespace(output=Place(str(tmp_path)))
    stats = SimpleNamespace(check=lambda _: None)
    data: Any = SimpleNamespace(
        streamed=True,
        num_rows=100,
        num_read_first=lambda: 0,
        read_rows=list,
        data_sets=[SimpleNamespace(name="rows", stats=lambda: stats)],
        num_train=lambda _: [89],
        check_classes=lambda _: None,
    )

    def resume(**length: int | None) -> None:
        run.config = override(config, {f"stages.0.{key}": value for key, value in length.items()})
        _read_data(run, data, None, {}, print, quiet=True)

    (run.output / "checkpoints/step-00000018/state.pt").write_text("")
    for allowed in ({"epochs": 2}, {"epochs": None, "steps": 18}):  # 16 steps are expected of two epochs
        with pytest.raises(AttributeError, match="guide"):  # which is read next
            resume(**allowed)
    for fewer in ({"epochs": 1}, {"epochs": None, "steps": 17}):
        with pytest.raises(
            ConfigError, match="has made 18 steps, and --resume would train for 1[07]; repeat"
        ):
            resume(**fewer)
