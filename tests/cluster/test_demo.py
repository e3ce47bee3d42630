"""A short version of the demo: placed digits, a trained encoder, a table and a picture."""

import io
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from raycl.config.overrides import override
from raycl.demo.digits import NUM_TEST, plan_demo, write_digits
from raycl.demo.run import run_demo
from raycl.errors import ConfigError
from raycl.storage import Place


@pytest.fixture(autouse=True)
def two_placements(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raycl.demo.digits.NUM_PLACEMENTS", 2)


def test_test_digits_are_never_seen_in_training(tmp_path: Path) -> None:
    train, test = (pq.read_table(uri) for uri in write_digits(Place(str(tmp_path))))
    assert (train.num_rows, test.num_rows) == ((1_797 - NUM_TEST) * 2, NUM_TEST * 2)
    assert not set(train["image"].to_pylist()) & set(test["image"].to_pylist())


def test_digits_are_equal_for_equal_seeds_and_cover_the_canvas(tmp_path: Path) -> None:
    uris = [write_digits(Place(str(tmp_path / name)))[1] for name in ("a", "b")]
    images = [pq.read_table(uri)["image"].to_pylist() for uri in uris]
    assert images[0] == images[1]
    pixels = np.stack([np.asarray(Image.open(io.BytesIO(content))) for content in images[0][:200]])
    assert pixels.shape[1:] == (32, 32)
    # Two hundred digits together cover the canvas except for its edges and corners.
    assert (pixels.max(axis=0) > 0).mean() > 0.75
    assert (pixels.max(axis=(1, 2)) > 100).all()


@pytest.mark.usefixtures("ray_cluster")
def test_the_demo_ends_with_a_table_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "demo"
    config = plan_demo(str(output), workers=1, epochs=1)
    scores = run_demo(str(output), override(config, {"encoder.width": 0.125}))
    assert list(scores) == ["raw pixels", "untrained encoder", "trained encoder"]
    for score in scores.values():
        assert 0.1 < score["linear"] < 1.0
        assert 0.1 < score["knn"] < 1.0
    assert 0.5 < scores["raw pixels"]["knn"] < 0.8
    printed, told = capsys.readouterr()
    assert "trained encoder" in printed
    assert "neighbors.png" in printed
    assert f"report: {output}/run/report.html" in told
    page = (output / "run" / "report.html").read_text()
    assert "Map before training" in page
    assert page.count("<img ") > 50  # neighbors
    with Image.open(output / "neighbors.png") as picture:
        assert picture.width > picture.height > 400
    with pytest.raises(ConfigError, match="earlier demo"):
        plan_demo(str(output), workers=1, epochs=1)
