"""Draw the views of a few images, as a run draws them.

    python benchmarks/view_pictures.py --data cifar10/train.parquet --output docs/images/views.png

A row is an image of the data, two views of full size, and four small crops, all at one scale.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from measuring import make_parser
from numpy.typing import NDArray
from pictures import FAINT, plt, save
from torch import device

from raycl.config.overrides import override
from raycl.data.images import Pixels
from raycl.data.in_memory import Batch
from raycl.recipes import recipe
from raycl.training.transforms import ImageTransform, image_format

SIZE, CROP, GAP = 32, 16, 4  # pixels
VIEWS = [{"count": 2}, {"count": 4, "size": CROP, "crop_scale": [0.05, 0.4]}]
NUM_IMAGES = 4


def read_images(data: Path) -> NDArray[np.uint8]:
    """Return some images [n, height, width, channels] of different classes."""
    table = pq.read_table(data, columns=["image", "label"]).slice(0, 1_000).to_pylist()
    by_label = {row["label"]: row["image"] for row in reversed(table)}
    decode = image_format(recipe("simclr", image_size=SIZE)).decode
    return np.stack([decode(by_label[label])[0] for label in sorted(by_label)[-NUM_IMAGES:]])


def draw(images: NDArray[np.uint8]) -> Figure:
    """Draw a row for each image."""
    plain: dict[str, Any] = {"augment.views": VIEWS, "augment.mean": [0.0] * 3, "augment.std": [1.0] * 3}
    transform = ImageTransform.of(override(recipe("simclr", image_size=SIZE), plain))
    count = len(images)
    batch = Batch(
        contents={"image": Pixels(images, np.ones(count, np.float32))},
        sample_id=np.arange(count),
        label=np.zeros(count, np.int64),
        epoch=0,
    )
    views = [transform.view(batch, number).on(device("cpu")) for number in range(6)]
    columns = [images / 255.0, *(view.permute(0, 2, 3, 1).clamp(0, 1).numpy() for view in views)]
    names = ["image", "view_a", "view_b", *(f"crop {number}" for number in range(1, 5))]
    width, height = 3 * (SIZE + GAP) + 4 * (CROP + GAP) + 3 * GAP, count * (SIZE + GAP) + 2 * GAP
    figure = plt.figure(figsize=(width / 22, height / 22))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    left: float = GAP
    for name, column in zip(names, columns, strict=True):
        _draw_column(axes, name, column, left)
        left += column.shape[1] + GAP + (GAP if name == "image" else 0)
    return figure


def _draw_column(axes: Axes, name: str, images: NDArray[Any], left: float) -> None:
    side = images.shape[1]
    axes.text(left + side / 2, GAP, name, ha="center", va="center", color=FAINT, fontsize=9)
    for row, image in enumerate(images):
        top = 2 * GAP + row * (SIZE + GAP) + (SIZE - side) / 2
        axes.imshow(image, extent=(left, left + side, top + side, top), interpolation="nearest")


def main() -> None:
    options = make_parser(__doc__, reports=False, data=Path, output=Path).parse_args()
    save(draw(read_images(options.data)), options.output, num_colors=200)


if __name__ == "__main__":
    main()
