"""The demo's digits on a canvas: each at random positions, sizes and angles.

On scikit-learn's plain 8x8 digits raw pixels already reach a kNN accuracy of 0.98. With random
placement they fail, and an encoder must learn invariance. The plan of the demo is here too, checked
before torch is imported and Ray starts.
"""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError
from raycl.gpus import cpu_has_bfloat16
from raycl.recipes import recipe
from raycl.records import CONFIG
from raycl.storage import Place

CANVAS = 32  # pixels
SIDES = (11.0, 20.0)  # pixels of a placed digit
ANGLES = (-30.0, 30.0)  # degrees
NUM_PLACEMENTS = 4
NUM_TEST = 500
RUN = "run"  # folder of the run below the output


def write_digits(output: Place, *, seed: int = 0) -> tuple[str, str]:
    """Write ``train.parquet`` and ``test.parquet`` below ``output``; return their addresses.

    Training and test set share no digit. Columns: ``image`` (PNG), ``label``.
    """
    from sklearn.datasets import load_digits  # which takes a second to import
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    train, test = train_test_split(
        np.arange(len(digits.target)), test_size=NUM_TEST, random_state=seed, stratify=digits.target
    )
    rng = np.random.default_rng(seed)
    uris = []
    for name, chosen in (("train", train), ("test", test)):
        place = output / f"{name}.parquet"
        place.write_bytes(_to_parquet(digits.images[chosen], digits.target[chosen], rng))
        uris.append(place.uri)
    return uris[0], uris[1]


def _to_parquet(images: NDArray[np.float64], labels: NDArray[np.int64], rng: np.random.Generator) -> bytes:
    placed = [_png(_place(image, rng)) for image in images for _ in range(NUM_PLACEMENTS)]
    table = pa.table({"image": pa.array(placed, pa.binary()), "label": np.repeat(labels, NUM_PLACEMENTS)})
    stream = io.BytesIO()
    pq.write_table(table, stream, row_group_size=1_024)
    return stream.getvalue()


def _place(digit: NDArray[np.float64], rng: np.random.Generator) -> Image.Image:
    """Rotate and scale a digit, 8x8 values up to 16, and place it on an empty canvas."""
    side = rng.uniform(*SIDES)
    picture = Image.fromarray((digit * (255 / 16)).astype(np.uint8))
    picture = picture.resize((round(side), round(side)), Image.Resampling.BICUBIC)
    picture = picture.rotate(rng.uniform(*ANGLES), Image.Resampling.BILINEAR, expand=True)
    left, top = (int(rng.integers(0, max(1, CANVAS - length + 1))) for length in picture.size)
    canvas = Image.new("L", (CANVAS, CANVAS))
    canvas.paste(picture, (left, top))
    return canvas


def _png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def plan_demo(output: str, *, workers: int, epochs: int) -> RunConfig:
    """Check the output, and return the configuration of the run below it.

    Raises ``ConfigError`` if it holds an earlier demo, or ``StorageError``.
    """
    config = _config(workers=workers, epochs=epochs)
    place = Place(output)
    if (place / RUN / CONFIG).exists():
        raise ConfigError(f"{output} holds an earlier demo; give another --output or remove it")
    place.check_writable()
    return config


def _config(*, workers: int, epochs: int) -> RunConfig:
    """Return SimCLR for the digits: a small ResNet; crops, angles and contrast, no flips."""
    return override(
        recipe("simclr", image_size=CANVAS, on_cpu=True),
        {
            "workers": workers,
            "precision": "bfloat16" if cpu_has_bfloat16() else "float32",
            "data.channels": 1,
            "augment.crop_scale": [0.4, 1.0],
            "augment.flip": 0.0,
            "augment.rotation": ANGLES[1],
            "stages.0.epochs": epochs,
            "stages.0.batch_size": max(workers, 128 // workers * workers),
            "stages.0.temperature": 0.15,
            "evaluation.num_test": 500,
        },
    )
