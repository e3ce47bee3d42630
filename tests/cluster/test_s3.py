"""Training with data and output on an S3 server over the real protocol."""

import pytest

import raycl
from raycl.errors import DataError, StorageError
from raycl.records import read_metrics, read_result
from raycl.storage import Place
from tests.cluster.test_run import NUM_IMAGES, NUM_INVALID, small_run
from tests.conftest import BUCKET
from tests.images import digit_files, write_digits

pytestmark = pytest.mark.usefixtures("ray_cluster")

ROOT = f"s3://{BUCKET}"


def test_places_on_s3_work_like_local_places() -> None:
    place = Place(f"{ROOT}/places")
    place.check_writable()
    (place / "b" / "2.txt").write_text("two")
    (place / "a.txt").write_text("one")
    assert place.files() == [("a.txt", 3), ("b/2.txt", 3)]
    assert (place / "b" / "2.txt").read_text() == "two"
    odd = place.root + "-odd"
    (Place(odd) / "a b#c%20?.txt").write_text("odd")
    assert Place(odd).files() == [("a b#c%20?.txt", 3)]
    assert place.is_folder()
    assert not (place / "c").exists()
    with pytest.raises(StorageError, match="cannot read"):
        (place / "c").read_bytes()


def test_a_missing_bucket_is_a_one_line_error() -> None:
    with pytest.raises(DataError, match="nothing at s3://no-such-bucket/x"):
        raycl.train(small_run(), data="s3://no-such-bucket/x", output=f"{ROOT}/runs/none", quiet=True)
    with pytest.raises(StorageError) as caught:
        raycl.train(small_run(), data="unused", output="s3://no-such-bucket/run", quiet=True)
    assert "\n" not in str(caught.value)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """One run from S3 to S3 that crashes in its second epoch and resumes."""
    folder = tmp_path_factory.mktemp("local")
    local = write_digits(folder / "digits.parquet", NUM_IMAGES, broken=NUM_INVALID)
    data, output = Place(f"{ROOT}/data/digits.parquet"), Place(f"{ROOT}/runs/first")
    data.write_bytes(local.read_bytes())
    config = small_run(**{"encoder.kwargs": {"channels": 1, "die_at": 13, "marker": str(folder / "died")}})
    raycl.train(config, data=data.uri, output=output.uri, quiet=True)
    return output


def test_a_run_on_s3_that_loses_a_worker_finishes_and_loads(run: Place) -> None:
    steps = [line["step"] for line in read_metrics(run) if "loss" in line]
    assert steps == list(range(1, read_result(run)["steps"] + 1))
    assert read_result(run)["status"] == "finished"
    assert raycl.load_encoder(run.uri).spec.representation_dim == 16


def test_a_folder_of_images_on_s3_is_embedded_to_s3(run: Place) -> None:
    import pyarrow.parquet as pq

    files, labels = digit_files(40)
    for index, (content, label) in enumerate(zip(files, labels, strict=True)):
        (Place(f"{ROOT}/folder") / f"{label}" / f"{index:03}.png").write_bytes(content)
    embedded = Place(f"{ROOT}/embedded.parquet")
    assert raycl.embed(run.uri, f"{ROOT}/folder", embedded.uri, quiet=True).num_rows == 40
    filesystem, path = embedded.resolve()
    assert sorted(pq.read_table(path, filesystem=filesystem)["label"].to_pylist()) == sorted(labels)
