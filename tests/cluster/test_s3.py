"""Places on an S3 server over the real protocol; ``test_run`` trains there."""

import pytest

import raycl
from raycl.errors import DataError, StorageError
from raycl.storage import Place
from tests.cluster.test_run import small_run
from tests.conftest import BUCKET

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
