"""Export: write an encoder for other packages."""

from raycl.arguments import Address, as_address
from raycl.errors import ConfigError
from raycl.inference.encoder import read_encoders
from raycl.inference.export.model2vec import model2vec_files
from raycl.inference.export.onnx import GRAPH, onnx_files
from raycl.inference.export.sentence_transformers import sentence_folder
from raycl.inference.export.timm import timm_files
from raycl.inference.export.torchvision import ARCHITECTURE, MODEL, WEIGHTS, torchvision_files
from raycl.inference.preflight import Package, check_inputs, check_package
from raycl.lease import writing_new
from raycl.models.encoder_io import ImageEncoder, TextEncoder
from raycl.models.registry import OWN, SideName


def export_encoder(
    run: Address,
    output: Address,
    *,
    side: SideName = "query",
    to: Package | None = None,
) -> str:
    """Write the encoder of ``run`` to the folder ``output`` for another package; return how to load it.

    ``sentence_transformers`` takes encoders of texts: ``SentenceTransformer(output).encode`` gives the
    vectors of ``load_encoder(run).encode``, not normalized. ``model2vec`` takes a bag of subwords without a network
    and bias: ``StaticModel.from_pretrained(output).encode`` gives the same vectors, normalized, of texts up to the
    maximum length. ``torchvision`` takes encoders of images: ``weights.pth`` holds the weights, ``architecture.json``
    the name of the network, or ``model.py`` builds a network that torchvision has no name for. ``timm`` takes its own
    networks among these, and ``timm.create_model("local-dir:...", pretrained=True)`` gives the vectors of ``encode``.
    ``onnx`` takes both:
    ``model.onnx`` is a graph of uint8 images [batch, image_size, image_size, channels], which it normalizes, or of
    int64 tokens [batch, length], which ``tokenizer.json`` gives; ``model.json`` describes its input. All load only
    local files. Without ``to``, images go to torchvision and texts to sentence-transformers. ``side`` selects one of two
    towers, with its projection head.

    Raises ``StorageError`` if the output exists, and ``ConfigError`` for an encoder that the package cannot
    represent, such as your own network; nothing is written then.
    """
    check_package(to)
    run, output = as_address("run", run), as_address("output", output)
    check_inputs(run, side=side, output=output)
    (saved,) = read_encoders(run, [side])
    if saved.spec.name == OWN:
        raise ConfigError(
            f"the run at {run} trained a network of your own, which no other package knows; "
            "load it with raycl.load_encoder"
        )
    encoder = saved.build()
    is_image = isinstance(encoder, ImageEncoder)
    package = "torchvision" if is_image else "sentence_transformers"
    if to not in (package, "timm" if is_image else "model2vec", "onnx", None):
        raise ConfigError(
            f"the encoder of {run} takes {'images' if is_image else 'texts'}, which {to} does not; use {package}"
        )
    files = _files(encoder, to)
    with writing_new(output) as place:
        for name, content in files.items():
            (place / name).write_bytes(content)
    if not place.is_local:
        return f"a local copy of {place}: {to or package} loads only local files"
    if to == "onnx":
        return f"onnxruntime.InferenceSession({str(place / GRAPH)!r})"
    if to == "model2vec":
        return f"model2vec.StaticModel.from_pretrained({str(place)!r})"
    if to == "timm":
        return f"timm.create_model({f'local-dir:{place}'!r}, pretrained=True)"
    if MODEL in files:
        return f"runpy.run_path({str(place / MODEL)!r})['build']()"
    if is_image:
        return f"torch.load({str(place / WEIGHTS)!r}) for the network in {place / ARCHITECTURE}"
    return f"sentence_transformers.SentenceTransformer({str(place)!r})"


def _files(encoder: ImageEncoder | TextEncoder, to: Package | None) -> dict[str, bytes]:
    """Return the files for a package that takes this kind of encoder, by name."""
    if to == "onnx":
        return onnx_files(encoder)
    if isinstance(encoder, ImageEncoder):
        return timm_files(encoder) if to == "timm" else torchvision_files(encoder)
    return model2vec_files(encoder) if to == "model2vec" else sentence_folder(encoder)
