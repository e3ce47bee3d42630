"""Real images for the tests: scikit-learn's digits and its two photographs."""

import io
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image
from sklearn.datasets import load_digits, load_sample_images


def encode(pixels: np.ndarray | Image.Image, kind: str = "PNG") -> bytes:
    """Encode pixels as an image file."""
    picture = pixels if isinstance(pixels, Image.Image) else Image.fromarray(pixels)
    stream = io.BytesIO()
    picture.save(stream, kind)
    return stream.getvalue()


def digit_files(num_images: int) -> tuple[list[bytes], list[int]]:
    """Return handwritten digits as PNG files of 16x16 pixels, and their labels."""
    digits = load_digits()
    pixels = np.kron(digits.images[:num_images], np.ones((2, 2))) * 15.9
    return [encode(image.astype(np.uint8)) for image in pixels], digits.target[:num_images].tolist()


def photograph() -> np.ndarray:
    """Return a photograph of 427 x 640 pixels."""
    return load_sample_images().images[0]


def write_digits(path: Path, num_images: int, *, broken: int = 0, labeled: bool = True) -> Path:
    """Write digits to a parquet file; the last ``broken`` rows are invalid images."""
    images, labels = digit_files(num_images)
    images[num_images - broken :] = [b"broken"] * broken
    table = pa.table({"image": pa.array(images, pa.binary()), "label": labels})
    table = table if labeled else table.drop_columns("label")
    pq.write_table(table, path, row_group_size=64)
    return path
