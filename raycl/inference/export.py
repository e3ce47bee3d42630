"""Leaving raycl: an encoder written so that other packages load it."""

from typing import Literal

from raycl.errors import ConfigError
from raycl.inference.encoder import read_encoders
from raycl.inference.preflight import admit, check_package
from raycl.inference.sentence_folder import sentence_folder
from raycl.inference.torchvision_weights import ARCHITECTURE, MODEL, WEIGHTS, torchvision_files
from raycl.lease import writing_new
from raycl.models.encoder_io import ImageEncoder
from raycl.models.registry import SideName
from raycl.models.trust import OWN

Package = Literal["sentence_transformers", "torchvision"]


def export_encoder(run: str, output: str, *, side: SideName = "query", to: Package | None = None) -> str:
    """Write the encoder of ``run`` to the folder ``output`` for another package; return how to load it.

    ``sentence_transformers`` takes encoders of texts: ``SentenceTransformer(output).encode`` gives the
    vectors of ``load_encoder(run).encode``, not brought to unit length. ``torchvision`` takes those of
    images: ``weights.pth`` holds its weights, ``architecture.json`` the name of its network, or ``model.py``
    builds it where torchvision has no name for it. Both packages load local folders alone. Without ``to`` the
    kind of the encoder decides. With two towers ``side`` says whose; its projection head is a part of it.

    Raises ``StorageError`` for an output that exists, and ``ConfigError`` for an encoder that the
    package has no place for, a network of the user's own among them; nothing is written then.
    """
    check_package(to)
    admit(run, side=side, output=output)
    (saved,) = read_encoders(run, [side])
    if saved.spec.name == OWN:
        raise ConfigError(
            f"the run at {run} trained a network of your own, which no other package knows; "
            "load it with raycl.load_encoder"
        )
    encoder = saved.build()
    is_image = isinstance(encoder, ImageEncoder)
    fitting = "torchvision" if is_image else "sentence_transformers"
    if to not in (fitting, None):
        raise ConfigError(
            f"the encoder of {run} takes {'images' if is_image else 'texts'}, which {to} does not; use {fitting}"
        )
    files = torchvision_files(encoder) if isinstance(encoder, ImageEncoder) else sentence_folder(encoder)
    with writing_new(output) as place:
        for name, content in files.items():
            (place / name).write_bytes(content)
    if not place.is_local:
        return f"a local copy of {place}: both packages load local folders alone"
    if MODEL in files:
        return f"runpy.run_path({str(place / MODEL)!r})['build']()"
    if is_image:
        return f"torch.load({str(place / WEIGHTS)!r}) for the network in {place / ARCHITECTURE}"
    return f"sentence_transformers.SentenceTransformer({str(output)!r})"
