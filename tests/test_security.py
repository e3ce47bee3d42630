"""Untrusted files and settings: their code never runs, and their names stay inside their folder."""

import ast
import io
import itertools
import json
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import EpsImagePlugin

from raycl.config.overrides import config_from_yaml, config_to_yaml, parse_setting
from raycl.data.columns import ColumnNames
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat, InvalidImageError
from raycl.errors import ConfigError, DataError, StorageError
from raycl.inference.encoder import load_checkpoint_encoder, load_encoder
from raycl.models.encoder_io import ImageEncoder, load_state, save_encoder
from raycl.models.image import build_image_encoder
from raycl.models.registry import TRUSTED, check_trusted
from raycl.models.specs import ImageEncoderSpec, TextEncoderSpec
from raycl.models.text import BagOfSubwords
from raycl.negatives.actor import QueueActor
from raycl.negatives.snapshot import read_current, shard_place, snapshot_steps
from raycl.negatives.spec import BankSpec
from raycl.storage import Place, repeated
from raycl.tokenization import train_tokenizer
from raycl.training.banks import _bank_name
from tests.conftest import BUCKET
from tests.images import write_digits
from tests.malicious_files import FORMS, as_pickle, as_text, pickled_column, write_parquet
from tests.table_files import write_arrow
from tests.test_checkpoint_encoder import small_config
from tests.test_cli import run_raycl

ROOT = Path(__file__).parent.parent
SOURCES = sorted([*(ROOT / "raycl").rglob("*.py"), *(ROOT / "jobs").rglob("*.py")])

# The error line; a library's warnings may precede it.
ONE_LINE = re.compile(r"raycl: [^\n]+\n")


@pytest.fixture
def marker(tmp_path: Path) -> Iterator[Path]:
    """Return a file that malicious content would create; it must not exist after the test."""
    path = tmp_path / "executed"
    yield path
    assert not path.exists(), "malicious content was executed"


# ---- the source code


def calls_in(path: Path) -> Iterator[tuple[str, ast.Call]]:
    """Yield the calls in a module with the function names as written."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def value_of(call: ast.Call, name: str) -> Any:
    found = [keyword.value for keyword in call.keywords if keyword.arg == name]
    return ast.literal_eval(found[0]) if found and isinstance(found[0], ast.Constant) else None


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module.split(".")[0], *(alias.name for alias in node.names)}
    return names


LOADERS = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "jsonpickle"}
PROGRAMS = {"eval", "exec", "compile", "os.system", "os.popen", "tempfile.mktemp"}
LOADS = {"torch.load", "torch.hub.load", "torch.jit.load"}
# The user's own networks, optional packages named by raycl, and raycl's public names.
MAY_IMPORT = {
    "raycl/loss_specs.py",  # objectives in the table LOSSES
    "raycl/__init__.py",
    "raycl/data/tables.py",
    "raycl/models/custom.py",
    "raycl/models/text.py",
}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_module_unpickles_evaluates_or_opens_a_public_socket(path: Path) -> None:
    assert not imported(path) & LOADERS
    for name, call in calls_in(path):
        assert name not in PROGRAMS, f"line {call.lineno}"
        assert name not in LOADS or value_of(call, "weights_only") is True, f"line {call.lineno}"
        assert not name.startswith("yaml.") or "load" not in name, (
            f"line {call.lineno}: only settings._Loader"
        )
        for flag in ("allow_pickle", "trust_remote_code", "shell"):
            assert not value_of(call, flag), f"line {call.lineno}: {flag}"
        assert value_of(call, "host") not in ("0.0.0.0", "::", ""), f"line {call.lineno}"
        if name.endswith("import_module"):
            is_ours = ast.unparse(call.args[0]).lstrip("f").startswith(("'raycl.", '"raycl.'))
            assert is_ours or str(path.relative_to(ROOT)) in MAY_IMPORT, f"line {call.lineno}"
    assert "0.0.0.0" not in path.read_text()


# ---- an encoder


def image_run(folder: Path) -> Path:
    spec = ImageEncoderSpec(
        name="resnet10",
        width=0.125,
        image_size=16,
        channels=1,
        stored_size=16,
        mean=(0.5,),
        std=(0.2,),
        representation_dim=64,
    )
    save_encoder(spec.build(), spec, Place(str(folder)))
    return folder


def text_run(folder: Path) -> Path:
    tokenizer = train_tokenizer(["a word", "another word"], vocabulary_size=270)
    sizes = {"num_tokens": tokenizer.num_tokens, "max_length": 16}
    spec = TextEncoderSpec(
        name="bag_of_subwords",
        tokenizer=tokenizer.fingerprint,
        arguments={"dim": 8},
        representation_dim=8,
        **sizes,
    )
    save_encoder(BagOfSubwords(dim=8, **sizes), spec, Place(str(folder)), tokenizer=tokenizer)
    return folder


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("file", ["encoder.json", "encoder.safetensors", "tokenizer.json"])
def test_a_pickle_in_place_of_a_file_of_an_encoder_is_refused(
    file: str, form: Callable[[Path], bytes], tmp_path: Path, marker: Path
) -> None:
    run = text_run(tmp_path / "run")
    load_encoder(str(run))
    (run / file).write_bytes(form(marker))
    with pytest.raises(StorageError):
        load_encoder(str(run))


@pytest.mark.parametrize("content", ["[" * 100_000, '{"kind":' * 50_000, "[]", "7", ""])
def test_an_invalid_description_of_an_encoder_is_refused(content: str, tmp_path: Path) -> None:
    run = image_run(tmp_path / "run")
    (run / "encoder.json").write_text(content)
    with pytest.raises(StorageError, match="is damaged"):
        load_encoder(str(run))


def commands(run: Path, data: Path, output: Path) -> dict[str, list[object]]:
    """Return the commands that load the encoder of a run."""
    return {
        "knn": ["evaluate", "knn", "--run", run, "--train", data, "--test", data],
        "linear": ["evaluate", "linear", "--run", run, "--train", data, "--test", data],
        "retrieval": ["evaluate", "retrieval", "--run", run, "--test", data],
        "sts": ["evaluate", "sts", "--run", run, "--test", data],
        "embed": ["embed", "--run", run, "--data", data, "--output", output],
        "mine": ["mine", "--run", run, "--data", data, "--output", output],
        "export": ["export", "--run", run, "--output", output],
    }


@pytest.mark.parametrize("door", ["knn", "linear", "retrieval", "sts", "embed", "mine", "export"])
def test_every_command_refuses_runs_with_pickles_or_code_in_one_line(
    door: str,
    tmp_path: Path,
    marker: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_digits(tmp_path / "data.parquet", 20)
    run = image_run(tmp_path / "run")
    command = commands(run, data, tmp_path / "output.parquet")[door]
    whole = (run / "encoder.safetensors").read_bytes()
    (run / "encoder.safetensors").write_bytes(as_pickle(marker))
    status, _, stderr = run_raycl(monkeypatch, capsys, *command)
    assert (status, "is damaged" in stderr) == (2, True), stderr
    assert ONE_LINE.fullmatch(stderr)

    (run / "encoder.safetensors").write_bytes(whole)
    name_code(run, "os:system", {"command": f"touch '{marker}'"})
    status, _, stderr = run_raycl(monkeypatch, capsys, *command)
    assert (status, "RAYCL_TRUSTED=os" in stderr) == (2, True), stderr
    assert ONE_LINE.fullmatch(stderr)
    assert not (tmp_path / "output.parquet").exists()


# ---- code that a run names


def name_code(run: Path, name: str, arguments: dict[str, Any]) -> None:
    described = json.loads((run / "encoder.json").read_text())
    (run / "encoder.json").write_text(json.dumps(described | {"name": name, "arguments": arguments}))


def test_code_that_a_run_names_is_imported_only_if_trusted(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "strangers_networks.py").write_text(f"open({str(marker)!r}, 'w')")
    monkeypatch.syspath_prepend(folder)
    (tmp_path / "state.pt").write_bytes(as_pickle(marker))
    of_images, of_texts = image_run(tmp_path / "images"), text_run(tmp_path / "texts")
    calls: dict[str, dict[str, Any]] = {
        "os:system": {"command": f"touch '{marker}'"},
        "subprocess:getoutput": {"cmd": f"touch '{marker}'"},
        "torch:load": {"f": str(tmp_path / "state.pt"), "weights_only": False},
        "strangers_networks:build": {},
        "tests_of_others:build": {},
        "transformers:pipeline": {"model": str(folder), "trust_remote_code": True},
    }
    for name, arguments in calls.items():
        for run in (of_images, of_texts):
            if run == of_texts and name.startswith("transformers:"):
                continue  # here the value is the address of a model
            name_code(run, name, arguments)
            with pytest.raises(ConfigError, match=f"RAYCL_TRUSTED={name.partition(':')[0]}"):
                load_encoder(str(run))


def test_trust_covers_the_modules_of_a_package_and_no_other_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRUSTED, "mine, other.networks")
    for name in ("mine:build", "mine.deep.er:build", "other.networks:build", "resnet18"):
        check_trusted(name, "encoder.json", is_text=False)
    check_trusted("transformers:/a/folder", "encoder.json", is_text=True)
    for name in ("mines:build", "other:build", "other.networks2:build", "transformers:pipeline", ":build"):
        with pytest.raises(ConfigError, match="asks to import"):
            check_trusted(name, "encoder.json", is_text=False)
    with pytest.raises(ConfigError, match="asks to import"):
        check_trusted("mine:build", "encoder.json", (), is_text=False)


def test_a_trusted_network_is_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = image_run(tmp_path / "run")
    network = build_image_encoder("tests.cluster.networks:small", image_size=16, arguments={"channels": 1})
    spec = ImageEncoderSpec.model_validate_json((run / "encoder.json").read_text())
    named = {"name": "tests.cluster.networks:small", "arguments": {"channels": 1}, "representation_dim": 16}
    save_encoder(network, spec.model_copy(update=named), Place(str(run)))
    monkeypatch.setenv(TRUSTED, "")
    with pytest.raises(ConfigError, match="RAYCL_TRUSTED=tests"):
        load_encoder(str(run))
    assert isinstance(load_encoder(str(run), trusted=["tests"]), ImageEncoder)
    assert isinstance(load_encoder(str(run), network=network), ImageEncoder)
    monkeypatch.setenv(TRUSTED, "tests")
    assert isinstance(load_encoder(str(run)), ImageEncoder)


# ---- a checkpoint


def resumed_run(folder: Path, checkpoint: str = "step-00000005") -> Path:
    (folder / "checkpoints" / "step-00000005").mkdir(parents=True)
    (folder / "config.yaml").write_text(config_to_yaml(small_config()))
    listed = folder / "checkpoints" / "checkpoint_manager_snapshot.json"
    listed.write_text(json.dumps({"latest_checkpoint_result": {"checkpoint_dir_name": checkpoint}}))
    return folder


def as_compiled_program(marker: Path) -> bytes:
    stream = io.BytesIO()
    with pytest.warns(FutureWarning):
        torch.jit.save(torch.jit.script(torch.nn.Linear(1, 1)), stream)
    return stream.getvalue()


@pytest.mark.parametrize("form", [*FORMS, as_compiled_program])
def test_a_checkpoint_that_holds_more_than_tensors_is_refused(
    form: Callable[[Path], bytes], tmp_path: Path, marker: Path
) -> None:
    with pytest.raises(StorageError, match="cannot read state.pt: .*which raycl never loads"):
        load_state(form(marker), "state.pt")
    run = resumed_run(tmp_path / "run")
    (run / "checkpoints" / "step-00000005" / "state.pt").write_bytes(form(marker))
    with pytest.raises(StorageError, match="which raycl never loads"):
        load_checkpoint_encoder(str(run))


def test_a_run_cannot_load_untrusted_code_or_a_checkpoint_outside_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    torch.save({"learner": {}}, outside / "state.pt")
    run = str(resumed_run(tmp_path / "run", "../../outside"))
    with pytest.raises(StorageError, match="would lead out of"):
        load_checkpoint_encoder(run)
    monkeypatch.setenv(TRUSTED, "")
    with pytest.raises(ConfigError, match="config.yaml asks to import 'tests.cluster.networks'"):
        load_checkpoint_encoder(run)


# ---- a bank's snapshot


def saved_queue(output: Path) -> BankSpec:
    plan = BankSpec(name="bank", kind="queue", dim=4, capacity=8, output=str(output))
    QueueActor(plan).save(3, 0)
    return plan


@pytest.mark.parametrize("form", FORMS)
def test_a_bank_does_not_execute_a_snapshot(
    form: Callable[[Path], bytes], tmp_path: Path, marker: Path
) -> None:
    plan = saved_queue(tmp_path)
    QueueActor(plan).restore(3, 1)
    Path(shard_place(plan, 0, 3).uri).write_bytes(form(marker))
    with pytest.raises(StorageError, match="cannot read"):
        QueueActor(plan).restore(3, 1)
    import ray.data  # noqa: F401  (Ray Data registers unpickling with Arrow)

    path = Path(shard_place(plan, 0, 3).uri)
    write_parquet(path, {"step": pa.array([1])}, "sample_id", pickled_column(marker, 1))
    with pytest.raises(DataError, match="pickled Python objects in 'sample_id'"):
        QueueActor(plan).restore(3, 1)


@pytest.mark.parametrize(
    "content",
    [
        "[" * 100_000,
        "[]",
        "{}x",
        '{"step": "../../x", "attempt": 0}',
        '{"step": -1}',
        '{"stop": 1}',
        '{"step": 1.5}',
    ],
)
def test_an_invalid_current_snapshot_is_refused(content: str, tmp_path: Path) -> None:
    plan = saved_queue(tmp_path)
    Path((plan.place / "current.json").uri).write_text(content)
    with pytest.raises(StorageError, match="current.json does not name a snapshot"):
        read_current(plan)


def test_other_folders_beside_the_snapshots_are_ignored(tmp_path: Path) -> None:
    plan = saved_queue(tmp_path)
    for name in ("step-x", "step-", "step--0000005", "step-" + 8 * chr(0x0667), "steps"):
        (tmp_path / "bank" / name).mkdir()
        (tmp_path / "bank" / name / "file").write_text("x")
    assert snapshot_steps(plan) == [3]


@given(st.text(max_size=20))
@example("../other")
@example("..")
def test_the_name_of_a_bank_never_contains_a_path(name: str) -> None:
    own = _bank_name(Place(f"/runs/{name}"))
    assert re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", own)
    assert BankSpec(name=own, kind="queue", dim=4, capacity=8, output="x").actor_name(0).count("/") == 1


# ---- data


IMAGES = {"image": pa.array([b"x"], pa.binary())}
TEXTS = {"text": pa.array(["a"])}
STS = {"sentence1": pa.array(["a"]), "sentence2": pa.array(["b"]), "score": pa.array([1.0])}


@pytest.mark.parametrize("in_list", [False, True])
@pytest.mark.parametrize("column", ["sample_id", "label", "image", "unused"])
def test_a_column_of_pickled_objects_is_refused_before_it_is_read(
    column: str, in_list: bool, tmp_path: Path, marker: Path
) -> None:
    import ray.data  # noqa: F401  (Ray Data registers unpickling with Arrow)

    plain = {name: values for name, values in IMAGES.items() if name != column}
    path = write_parquet(tmp_path / "rows.parquet", plain, column, pickled_column(marker, 1), in_list=in_list)
    with pytest.raises(DataError, match=f"pickled Python objects in '{column}', which raycl never loads"):
        source = find_source(str(path), ColumnNames())
        list(source.read(source.fragments[0]))
    # A plain reader of parquet copies the bytes, and does not run them.
    arrow = write_arrow(tmp_path / "rows.arrow", pq.ParquetFile(path).read())
    with pytest.raises(DataError, match=f"pickled Python objects in '{column}', which raycl never loads"):
        find_source(str(arrow), ColumnNames())


def test_a_plain_reader_would_execute_a_column_of_pickled_objects(tmp_path: Path) -> None:
    import ray.data  # noqa: F401

    marker = tmp_path / "executed"
    path = write_parquet(tmp_path / "rows.parquet", TEXTS, "id", pickled_column(marker, 1))
    pq.read_table(path)["id"].to_pylist()
    assert marker.exists()


def test_sentences_for_evaluation_are_not_executed(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import ray.data  # noqa: F401

    path = write_parquet(tmp_path / "sts.parquet", STS, "dataset", pickled_column(marker, 1))
    run = text_run(tmp_path / "run")
    status, _, stderr = run_raycl(monkeypatch, capsys, "evaluate", "sts", "--run", run, "--test", path)
    assert (status, "pickled Python objects in 'dataset'" in stderr) == (2, True), stderr


def test_an_embedding_for_a_query_is_not_executed(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.malicious_files import Malice

    np.save(tmp_path / "vector.npy", np.array([Malice(marker)], object), allow_pickle=True)
    (tmp_path / "vector.json").write_bytes(as_text(marker))
    for file in ("vector.npy", "vector.json"):
        command = ("bank", "nearest", "any", "--vector", tmp_path / file)
        status, _, stderr = run_raycl(monkeypatch, capsys, *command)
        assert (status, "does not contain an embedding" in stderr) == (2, True), stderr


def test_an_image_that_is_a_program_is_not_executed(
    tmp_path: Path, marker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "gs"
    program.write_text(f"#!/bin/sh\ntouch '{marker}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    drawn = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\nshowpage\n"
    with pytest.raises(InvalidImageError, match="a PostScript program instead of an image"):
        ImageFormat(size=8).decode(drawn)


# ---- settings


@pytest.mark.parametrize(
    "text",
    [
        "!!python/object/apply:os.system ['touch {marker}']",
        "!!python/name:os.system",
        "recipe: !!python/object/new:os.system ['touch {marker}']",
        "!!binary x",
        "[" * 2_000,
        "a: &a [*a]",
        "a: &a {{b: *a}}",
    ],
)
def test_yaml_with_code_or_without_end_is_refused(text: str, marker: Path) -> None:
    text = text.replace("{marker}", str(marker)).replace("{{", "{").replace("}}", "}")
    with pytest.raises(ConfigError):
        config_from_yaml(text)
    with pytest.raises(ConfigError):
        parse_setting(f"seed={text}")


def test_yaml_aliases_that_grow_exponentially_are_refused() -> None:
    rows = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    rows += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40)]
    with pytest.raises(ConfigError, match="its aliases repeat more than 100,000 values"):
        config_from_yaml("\n".join(rows))


def test_a_few_aliases_are_allowed() -> None:
    stated = yaml.safe_load(config_to_yaml(small_config()))
    stated["stages"] = [stated["stages"][0]] * 2  # written by YAML as an alias
    text = yaml.safe_dump(stated)
    assert "*id" in text
    assert len(set(config_from_yaml(text).stages)) == 1


# ---- names


NAMES = st.text(alphabet=st.sampled_from("ab./\\%2e~$ \n:@?#é"), max_size=12) | st.text(max_size=12)


@settings(deadline=None, max_examples=100)
@given(st.lists(NAMES, max_size=4))
@example(["../x"])
@example(["a", ".."])
@example(["a/../../b"])
@example(["/etc/passwd"])
@example(["a\0b"])
def test_names_below_a_folder_stay_below_it(names: list[str]) -> None:
    for root in ("/runs/one", "s3://bucket/runs/one"):
        place = Place(root)
        try:
            for name in names:
                place = place / name
        except StorageError as error:
            assert any(".." in name.split("/") or "\0" in name for name in names)
            assert "would lead out of" in str(error)
            continue
        assert place.uri == root or place.uri.startswith(f"{root}/")
        if place.is_local:
            assert os.path.normpath(place.resolve()[1]).startswith("/runs/one")
            with pytest.raises(StorageError):
                place.read_bytes()
    with pytest.raises(StorageError, match="would lead out of"):
        Place("/runs/one", "../two")


def test_a_bucket_listing_cannot_escape_its_prefix(s3_server: str) -> None:
    client = boto3.client("s3", endpoint_url=s3_server)
    for key in (
        "hostile/set/a.png",
        "hostile/set/../secret.png",
        "hostile/set/../../b.png",
        "hostile/secret.png",
    ):
        client.put_object(Bucket=BUCKET, Key=key, Body=key.encode())
    place = Place(f"s3://{BUCKET}/hostile/set")
    found = [path for path, _ in place.files()]
    assert "a.png" in found
    assert not [path for path in found if ".." in path.split("/")]
    assert b"hostile/secret.png" not in [(place / path).read_bytes() for path in found]


def test_an_address_with_a_secret_is_refused_without_repeating_it() -> None:
    uses: dict[str, Callable[[str], Any]] = {
        "s3://AKIA:{}@bucket/path?region=x": lambda address: Place(address).exists(),
        "s3://AKIA:{}@bucket": lambda address: Place(address).parent,
        "s3://AKIA:{}@bucket/run": lambda address: repeated([address, address]),
    }
    for (address, use), secret in itertools.product(
        uses.items(), ("SEC", "SEC%2FRET", "SEC/RET", "SEC@/SEC")
    ):
        with pytest.raises(ConfigError, match="AWS_SECRET_ACCESS_KEY") as caught:
            use(address.format(secret))
        assert "SEC" not in str(caught.value).replace("AWS_SECRET_ACCESS_KEY", "")
        assert "AKIA" not in str(caught.value)


def test_written_files_are_not_writable_by_others(tmp_path: Path) -> None:
    before = os.umask(0o022)
    try:
        run = text_run(tmp_path / "runs" / "one")
        saved_queue(run)
    finally:
        os.umask(before)
    written = [run, *run.rglob("*")]
    assert len(written) > 5
    assert not [path for path in written if stat.S_IMODE(path.stat().st_mode) & 0o022]


def test_the_token_is_readable_by_its_owner_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from raycl.ray_runtime import _keep_token_private

    token = tmp_path / ".ray" / "auth_token"
    monkeypatch.setenv("HOME", str(tmp_path))
    for name, value in (("RAY_AUTH_MODE", "disabled"), ("RAY_AUTH_TOKEN_PATH", "elsewhere")):
        monkeypatch.setenv(name, value)
        _keep_token_private()
        monkeypatch.delenv(name)
        assert not token.exists()
    _keep_token_private()
    content = token.read_text()
    assert re.fullmatch("[0-9a-f]{64}", content)
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    token.chmod(0o644)
    _keep_token_private()
    assert (token.read_text(), stat.S_IMODE(token.stat().st_mode)) == (content, 0o600)
    shutil.rmtree(token.parent)
    (tmp_path / ".ray").write_text("in the way")
    _keep_token_private()  # Ray reports the error itself
