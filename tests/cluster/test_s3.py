"""Training from and to an S3 server over the real protocol."""

from pathlib import Path

import pytest

import raycl
from raycl.errors import DataError, RunError, StorageError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.test_run import NUM_BROKEN, NUM_IMAGES, small_run
from tests.conftest import BUCKET
from tests.images import digit_files, write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = f"s3://{BUCKET}"


def test_places_on_s3_work_like_local_ones() -> None:
    place = Place(f"{ROOT}/places")
    place.check_writable()
    (place / "b" / "2.txt").write_text("two")
    (place / "a.txt").write_text("one")
    assert place.files() == [("a.txt", 3), ("b/2.txt", 3)]
    assert (place / "b" / "2.txt").read_text() == "two"
    assert place.is_folder()
    assert not (place / "c").exists()
    with pytest.raises(StorageError, match="cannot read"):
        (place / "c").read_bytes()


def test_a_bucket_that_is_not_there_is_one_clear_line() -> None:
    with pytest.raises(DataError, match="nothing at s3://no-such-bucket/x"):
        raycl.train(small_run(), data="s3://no-such-bucket/x", output=f"{ROOT}/runs/none", quiet=True)
    with pytest.raises(StorageError) as caught:
        raycl.train(small_run(), data="unused", output="s3://no-such-bucket/run", quiet=True)
    assert "\n" not in str(caught.value)


def test_a_run_on_s3_is_killed_resumed_and_loaded(tmp_path: Path) -> None:
    local = write_digits(tmp_path / "digits.parquet", NUM_IMAGES, broken=NUM_BROKEN)
    data, output = Place(f"{ROOT}/data/digits.parquet"), Place(f"{ROOT}/runs/first")
    data.write_bytes(local.read_bytes())
    marker = str(tmp_path / "died")
    config = small_run(**{"encoder.arguments": {"channels": 1, "die_at": 13, "marker": marker}})
    with pytest.raises(RunError):
        raycl.train(config, data=data.uri, output=output.uri, quiet=True)
    result = raycl.train(config, data=data.uri, output=output.uri, resume=True, quiet=True)
    assert result.steps == 18
    assert read_result(output)["status"] == "finished"
    assert [line["step"] for line in read_metrics(output) if "loss" in line] == list(range(1, 19))
    encoder = raycl.load_encoder(output.uri)
    assert encoder.spec.representation_dim == 16


def test_a_folder_of_images_on_s3_is_embedded_to_s3(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    files, labels = digit_files(40)
    for index, (content, label) in enumerate(zip(files, labels, strict=True)):
        (Place(f"{ROOT}/folder") / f"{label}" / f"{index:03}.png").write_bytes(content)
    run = Place(f"{ROOT}/runs/folder")
    config = small_run(**{"stages.0.epochs": 1, "stages.0.batch_size": 32, "workers": 1})
    raycl.train(config, data=f"{ROOT}/folder", output=run.uri, quiet=True)
    embedded = Place(f"{ROOT}/embedded.parquet")
    assert raycl.embed(run.uri, f"{ROOT}/folder", embedded.uri, quiet=True).num_rows == 40
    filesystem, path = embedded.resolve()
    assert sorted(pq.read_table(path, filesystem=filesystem)["label"].to_pylist()) == sorted(labels)
