"""The Python API of the commands: options, refusals, and encoders for images of any type."""

import io
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from PIL import Image
from ray.data.extensions import ArrowTensorArray

import raycl
from raycl.api import Measure
from raycl.cli.plan import NUM_PEEKED, command_settings, plan_run, run_flags
from raycl.config.overrides import override
from raycl.data.codecs import store_all
from raycl.data.images import read_image
from raycl.errors import ConfigError, DataError, RayclError
from raycl.inference.embed import Embedder
from raycl.inference.encoder import load_encoder
from raycl.models.encoder_io import ImageEncoder
from raycl.recipes import recipe
from raycl.storage import Place
from tests.encoders import write_images_run
from tests.images import digit_files, encode, photograph, write_digits


@pytest.fixture
def digits(tmp_path: Path) -> Path:
    return write_digits(tmp_path / "digits.parquet", 100)


def test_recipes_files_and_configurations_accept_the_same_flags(digits: Path, tmp_path: Path) -> None:
    flags = run_flags(workers="1:2", gpu=False, steps=3, batch_size=32, seed=5)
    config = recipe("simclr", image_size=16, gray=True)
    (tmp_path / "mine.yaml").write_text(raycl.config_to_yaml(config))
    for settings in ({"precision": "bfloat16"}, ["precision=bfloat16"]):
        named, read, stated = (
            plan_run(each, data=[str(digits)], flags=flags, settings=settings).config
            for each in ("simclr", str(tmp_path / "mine.yaml"), config)
        )
        assert named == read == stated
        assert (stated.worker_range(stated.stages[0]), stated.precision) == ((1, 2), "bfloat16")
        assert (stated.stages[0].steps, stated.stages[0].batch_size, stated.seed) == (3, 32, 5)


class Images:
    """The part of a Ray Dataset needed to read its first images."""

    def __init__(self, values: Any, column: str = "image") -> None:
        self._table = pa.table({column: values})

    def schema(self) -> SimpleNamespace:
        return SimpleNamespace(names=self._table.column_names)

    def limit(self, number: int) -> "Images":
        return Images(self._table.column(0)[:number], *self._table.column_names)

    def iter_batches(self, *, batch_size: int, batch_format: str) -> list[pa.Table]:
        assert (batch_size >= self._table.num_rows, batch_format) == (True, "pyarrow")
        return [self._table]


def test_a_recipe_infers_the_image_size_from_a_dataset() -> None:
    arrays = ArrowTensorArray.from_numpy(np.zeros((20, 12, 14, 3), np.uint8))
    structs = [{"bytes": encode(np.zeros((12, 14, 3), np.uint8)), "path": "a.png"}]
    for values in (arrays, structs):
        images: Any = Images(values)
        assert plan_run("simclr", data=[images], flags={}, settings={}).config.data.image_size == 12
    unnamed: Any = Images(arrays, "img")
    with pytest.raises(DataError, match="the dataset has no column 'image'; it has img"):
        plan_run("simclr", data=[unnamed], flags={}, settings={})


def test_a_recipe_infers_the_image_size_of_a_folder_from_few_of_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        path = tmp_path / "ab"[number % 2] / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(encode(np.zeros((12, 14, 3), np.uint8)))
    read: list[Place] = []
    monkeypatch.setattr(
        "raycl.data.sources.read_image", lambda place: (read.append(place), read_image(place))[1]
    )
    assert plan_run("simclr", data=[str(tmp_path)], flags={}, settings={}).config.data.image_size == 12
    assert len(read) == NUM_PEEKED


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "exclude each other"),
        ({"workers": "two"}, "or MIN:MAX, got 'two'"),
        ({"settings": {"no.such": 1}}, "unknown key no.such"),
        ({"settings": ["no.such=1"]}, "unknown key no.such"),
        ({"batch_size": 128}, "a batch of 128 rows"),
        ({"dataset": object()}, "exactly one of data .* and dataset"),
        ({"recipe": Path("none.yaml")}, "cannot read .*none.yaml"),
    ],
)
def test_training_by_name_is_refused_in_one_line(
    options: dict[str, Any], message: str, digits: Path, tmp_path: Path
) -> None:
    arguments: dict[str, Any] = {"recipe": "simclr", "data": digits, "output": tmp_path / "run", **options}
    with pytest.raises(RayclError, match=message):
        raycl.train(**arguments)
    assert not (tmp_path / "run").exists()


def test_flags_for_one_stage_are_refused_with_several_stages(tmp_path: Path) -> None:
    stage = {"epochs": 1, "batch_size": 32}
    staged = override(recipe("simclr", image_size=16), {"stages": [stage, stage]})
    with pytest.raises(ConfigError, match="the configuration has 2 stages"):
        raycl.train(staged, data="none", output=tmp_path / "run", epochs=3)


@pytest.mark.parametrize("measure", get_args(Measure))
def test_evaluation_options_match_those_of_the_command(measure: Any, tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(ConfigError, match="unknown key") as of_command:
        command_settings(measure, ["no.such=1"])
    with pytest.raises(ConfigError, match=f"evaluate {measure} has no option 'magic'") as of_function:
        raycl.evaluate(measure, run=tmp_path, test=tmp_path, train=tmp_path, magic=1)
    allowed = re.findall(r"[\w.]+", str(of_command.value).partition("allowed: ")[2])
    names = {"columns" if "columns." in path else path.rpartition(".")[2] for path in allowed}
    known = set(str(of_function.value).partition("it has ")[2].split(", "))
    assert known - {"network"} == names


@pytest.mark.parametrize(
    ("measure", "option"),
    [("knn", "seed"), ("knn", "labels_per_class"), ("linear", "k"), ("linear", "temperature")],
)
def test_an_option_of_the_other_measure_is_refused(measure: Any, option: str, tmp_path: Path) -> None:
    (tmp_path / "encoder.json").write_text("{}")
    with pytest.raises(ConfigError, match=f"evaluate {measure} has no option '{option}'"):
        raycl.evaluate(measure, run=tmp_path, test=tmp_path, train=tmp_path, **{option: 1})
    with pytest.raises(ConfigError, match=f"unknown key {option}"):
        command_settings(measure, [f"{option}=1"])


@pytest.mark.parametrize(
    ("measure", "option", "says"),
    [
        ("knn", {"k": 0}, "k must be at least 1, came 0"),
        ("knn", {"temperature": 0.0}, "temperature must be above 0, came 0.0"),
        ("knn", {"temperature": float("nan")}, "temperature must be above 0, came nan"),
        ("knn", {"max_invalid_fraction": float("nan")}, "max_invalid_fraction must be from 0 to 1, came nan"),
        ("linear", {"labels_per_class": 0}, "labels_per_class must be at least 1, came 0"),
        ("linear", {"seed": -1}, "seed must be at least 0, came -1"),
        ("retrieval", {"examples": -1}, "examples must be at least 0, came -1"),
    ],
)
def test_an_option_out_of_range_is_refused_before_reading(measure: Any, option: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        raycl.evaluate(measure, run="nowhere", test="nowhere", train="nowhere", **option)


def test_an_invalid_fraction_of_rows_to_embed_is_refused_before_reading(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="max_invalid_fraction must be from 0 to 1, came -1"):
        raycl.embed("nowhere", "nowhere", tmp_path / "embedded", max_invalid_fraction=-1.0)


def test_an_unknown_measure_and_a_missing_dataset_are_refused_before_reading() -> None:
    with pytest.raises(ConfigError, match="unknown measure 'magic'; choose knn, linear, retrieval or sts"):
        raycl.evaluate("magic", run="run", test="test")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ConfigError, match="evaluate knn needs --train"):
        raycl.evaluate("knn", run="run", test="test")


def test_the_doctor_refuses_flags_without_a_recipe() -> None:
    with pytest.raises(ConfigError, match="give one, for example raycl doctor simclr"):
        raycl.run_doctor(workers=2)
    with pytest.raises(ConfigError, match="unknown key k"):
        raycl.run_doctor(settings={"k": 1})


# Images of any type


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_images_run(
        tmp_path_factory.mktemp("runs") / "run", "resnet10", width=0.125, representation_dim=64
    )


def embedded(run: str, files: list[bytes]) -> torch.Tensor:
    """Return the embeddings of these files from ``raycl embed``."""
    formats = {"image": load_encoder(run).spec.image_format()}  # pyright: ignore[reportAttributeAccessIssue]
    columns = store_all(formats, {"image": formats["image"].decode_all(files)})
    numbers = pa.array(range(len(files)), pa.int64())
    table = pa.table({**columns, "sample_id": numbers, "label": numbers})
    return torch.tensor(Embedder(load_encoder(run))(table)["representation"].to_pylist())


def test_images_of_any_type_get_the_same_embeddings_as_from_embed(run: str, tmp_path: Path) -> None:
    files = [*digit_files(3)[0], encode(photograph()), encode(photograph()[:60, :90], "JPEG")]
    for number, content in enumerate(files):
        (tmp_path / f"{number}.img").write_bytes(content)
    pixels = [np.asarray(Image.open(io.BytesIO(content))) for content in files]
    assert {image.ndim for image in pixels} == {2, 3}
    encoder = load_encoder(run)
    assert isinstance(encoder, ImageEncoder)
    mixed = [
        *(str(tmp_path / "0.img"), files[1], pixels[2]),
        *(Image.open(tmp_path / "3.img"), tmp_path / "4.img"),
    ]
    expected = embedded(run, files)
    for images, batch_size in ((mixed, 256), (files, 2), (pixels, 256)):
        torch.testing.assert_close(encoder.encode(images, batch_size=batch_size), expected, rtol=0, atol=1e-5)
    series: Any = pd.Series([str(tmp_path / f"{number}.img") for number in range(len(files))])
    torch.testing.assert_close(encoder.encode(series, batch_size=2), expected, rtol=0, atol=1e-5)
    assert encoder.encode([]).shape == (0, encoder.spec.representation_dim)


@pytest.mark.filterwarnings("error")
def test_an_array_of_images_is_encoded_in_batches(run: str) -> None:
    encoder = load_encoder(run)
    assert isinstance(encoder, ImageEncoder)
    images = np.random.default_rng(0).integers(0, 256, (5, 32, 32, encoder.spec.channels), np.uint8)
    expected, sizes = encoder.encode(list(images)), list[int]()
    encoder.network.register_forward_hook(lambda _, rows, __: sizes.append(len(rows[0])))
    read_only = images.copy()
    read_only.flags.writeable = False
    for same in (torch.from_numpy(images), read_only, np.ascontiguousarray(images[:, ::-1])[:, ::-1]):
        torch.testing.assert_close(encoder.encode(same, batch_size=2), expected, rtol=0, atol=1e-5)
        assert sizes == [2, 2, 1]
        sizes.clear()
    for bad in (images[0], images.astype(np.float32), images[..., :0], np.array(["a.jpg"])):
        with pytest.raises(ConfigError, match="images of a wrong type or shape") as caught:
            encoder.encode(bad)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("none.jpg", "image 1 .none.jpg. cannot be used: cannot read .*none.jpg"),
        (b"no image", "image 1 cannot be used: not an image"),
        (np.zeros((4, 4), np.float32), "image 1 cannot be used: an array other than uint8"),
        (np.zeros((4, 4, 2), np.uint8), "image 1 cannot be used: an array without 1, 3 or 4 channels"),
        (None, "image 1 is of type NoneType; give a path"),
        ([1, 2], "image 1 is of type list; give a path"),
    ],
    ids=["no file", "no image", "floats", "channels", "nothing", "a list"],
)
def test_an_invalid_image_is_reported_by_position(run: str, bad: Any, message: str) -> None:
    good, encoder = digit_files(1)[0][0], load_encoder(run)
    for size in (1, 256):
        with pytest.raises(DataError, match=message) as caught:
            encoder.encode([good, bad], batch_size=size)
        assert "\n" not in str(caught.value)


def test_a_single_image_instead_of_a_list_is_refused(run: str) -> None:
    with pytest.raises(DataError, match="encode takes a list of images, came str; put it into a list"):
        load_encoder(run).encode("a.jpg")
