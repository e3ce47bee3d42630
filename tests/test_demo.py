"""The picture of the demo: a query of each digit, and the accuracy above each block of neighbors."""

import shlex
import signal
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from raycl.cli.main import app
from raycl.config import RunConfig
from raycl.config.overrides import config_to_yaml
from raycl.data.codecs import store_all
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.demo.digits import plan_demo
from raycl.demo.run import NUM_NEIGHBORS, Representation, draw_neighbors, run_demo
from raycl.errors import RunError, StoppedError
from raycl.training.preflight import ValidatedRun
from tests.images import digit_files, write_digits

NUM_TRAIN = 80


def digits(first: int, last: int) -> InMemoryDataset:
    images, labels = (each[first:last] for each in digit_files(last))
    formats = {"image": ImageFormat(size=16, channels=1)}
    decoded = {role: each.decode_all(images) for role, each in formats.items()}
    numbers = {"sample_id": pa.array(range(first, last)), "label": pa.array(labels)}
    return InMemoryDataset([pa.table(store_all(formats, decoded) | numbers)], formats)


@pytest.mark.parametrize("workers", [1, 2, 3, 7, 8, 200])
def test_the_batch_divides_over_any_number_of_workers(workers: int, tmp_path: Path) -> None:
    batch_size = plan_demo(str(tmp_path), workers=workers, epochs=1).stages[0].batch_size
    assert batch_size % workers == 0
    assert workers > 128 or 120 <= batch_size <= 128


def test_a_stopped_demo_says_how_to_finish_its_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, resumed = tmp_path / "the demo", list[bool]()
    place.mkdir()
    data = str(write_digits(place / "train.parquet", 200))

    def stop(config: RunConfig, *, output: str, **_: object) -> None:
        Path(output).mkdir()
        (Path(output) / "config.yaml").write_text(config_to_yaml(config))
        raise StoppedError("the run was stopped after step 3; continue it with --resume", signal.SIGINT)

    def resume(run: ValidatedRun, **_: object) -> None:
        resumed.append(run.resumed)
        raise RunError("it would train")

    monkeypatch.setattr("raycl.demo.run.write_digits", lambda _: (data, data))
    monkeypatch.setattr("raycl.demo.run.train", stop)
    with pytest.raises(
        StoppedError, match="^the run was stopped after step 3; finish the run with `"
    ) as caught:
        run_demo(str(place), plan_demo(str(place), workers=1, epochs=1))
    assert caught.value.signum == signal.SIGINT
    _, *arguments = shlex.split(str(caught.value).split("`")[1])
    monkeypatch.setattr("raycl.ray_runtime.prestart_ray", lambda *_, **__: None)
    monkeypatch.setattr("raycl.training.launch.train_validated", resume)
    with pytest.raises(RunError, match="it would train"):
        app(arguments, standalone_mode=False)
    assert resumed == [True]


def test_the_picture_has_a_query_of_each_digit_and_an_accuracy_above_each_block() -> None:
    train, test = digits(0, NUM_TRAIN), digits(NUM_TRAIN, 2 * NUM_TRAIN)
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(NUM_TRAIN, 4, generator=generator) for _ in range(2)]
    found = [Representation(name=name, train=vectors[0], test=vectors[1]) for name in ("before", "after")]
    scores = {"before": {"knn": 0.25}, "after": {"knn": 0.875}}
    figure = draw_neighbors(found, scores, train, test)
    assert len(figure.axes) == 10 * (1 + 2 * NUM_NEIGHBORS)
    texts = [text.get_text() for text in figure.texts]
    assert "nearest by before\nkNN accuracy 0.250" in texts
    assert "nearest by after\nkNN accuracy 0.875" in texts
