"""Draw the README's picture from the folder of a finished demo: neighbors before and after training.

raycl demo --output demo
python benchmarks/front_picture.py --demo demo --output docs/images/front.png
"""

from pathlib import Path

from measuring import make_parser
from pictures import save

from raycl.data.decode import Decoder
from raycl.data.discovery import find_source
from raycl.data.images import ImageFormat
from raycl.data.in_memory import InMemoryDataset
from raycl.demo.digits import CANVAS, RUN
from raycl.demo.run import compare
from raycl.inference.encoder import load_encoder
from raycl.models.encoder_io import ImageEncoder


def read(path: Path) -> InMemoryDataset:
    """Decode the digits of a file in this process, without Ray."""
    source, formats = find_source(str(path)), {"image": ImageFormat(size=CANVAS, channels=1)}
    decoder = Decoder(formats=formats, coordinator=None)
    tables = [decoder.tables(each.name, source.read(each)) for each in source.fragments]
    return InMemoryDataset([table for part in tables for table in part], formats)


def main() -> None:
    options = make_parser(__doc__, reports=False, demo=Path, output=Path).parse_args()
    encoder = load_encoder(options.demo / RUN)
    assert isinstance(encoder, ImageEncoder), "the demo trains on digits"
    scores, figure = compare(
        encoder, read(options.demo / "train.parquet"), read(options.demo / "test.parquet")
    )
    print(scores)
    save(figure, options.output, dpi=150)


if __name__ == "__main__":
    main()
