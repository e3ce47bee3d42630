"""Export of image encoders to torchvision."""

import io
import json
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import VisionTransformer
from torchvision.models.resnet import ResNet

from raycl.errors import ConfigError
from raycl.models.encoder_io import ImageEncoder
from raycl.models.image import BLOCKS, last_layer
from raycl.models.registry import RESNETS, VITS
from raycl.models.specs import ImageEncoderSpec

WEIGHTS = "weights.pth"
ARCHITECTURE = "architecture.json"
MODEL = "model.py"

_MODEL = '''"""An encoder that raycl trained, built of torchvision's parts: ``build()`` returns it with its weights."""

from pathlib import Path

import torch
import torchvision
from torch import nn
from torchvision.models import resnet

IMAGE_SIZE, MEAN, STD = {spec.image_size}, {spec.mean}, {spec.std}
{definition}

def build() -> nn.Module:
    """Return the encoder: images float32 [batch, {spec.channels}, IMAGE_SIZE, IMAGE_SIZE] to [batch, {spec.representation_dim}].

    Pixels are divided by 255, then normalized by MEAN and STD.
    """
    network = {construction}
{replaced}
    network.load_state_dict(torch.load(Path(__file__).with_name("{weights}"), weights_only=True))
    return network.eval()
'''
_RESNET = '''

class Encoder(resnet.ResNet):
    """torchvision's ResNet with channels of these widths."""

    widths = {widths}

    def _make_layer(self, block, planes, *args, **kwargs):
        if planes == 64:
            self.inplanes = {stem}
        return super()._make_layer(block, self.widths[planes], *args, **kwargs)
'''


def torchvision_files(encoder: ImageEncoder) -> dict[str, bytes]:
    """Return the weights under torchvision's names, and a description of the network.

    A projection head of one layer becomes the last layer, as does the layer that whitens. Without either the network
    has no last layer and returns its input, the representation. ``architecture.json`` names a network of torchvision with
    its arguments and the preparation of images. If torchvision has no such network, because of the stem,
    the width or the number of channels, ``model.py`` has a function ``build`` that returns it with its
    weights. Raises ``ConfigError`` for a network that is neither a ResNet nor a ViT, a norm other than
    BatchNorm, or a deeper head.
    """
    spec = encoder.spec
    network, layers = network_and_head(encoder, "torchvision")
    last = "heads.head" if isinstance(network, VisionTransformer) else "fc"
    weights = weights_of(network, layers, last)
    arguments = _arguments(network) | ({"num_classes": spec.representation_dim} if layers else {})
    name = "VisionTransformer" if isinstance(network, VisionTransformer) else spec.name
    file = io.BytesIO()
    torch.save(weights, file)
    files = {WEIGHTS: file.getvalue()}
    if not _fits(name, arguments, weights, last):
        return files | {MODEL: _source(spec, network, layers, arguments).encode()}
    architecture = {
        "network": f"torchvision.models.{name}",
        "arguments": arguments,
        "last_layer": last if layers else None,
        "image_size": spec.image_size,
        "mean": spec.mean,
        "std": spec.std,
    }
    return files | {ARCHITECTURE: (json.dumps(architecture, indent=2) + "\n").encode()}


def network_and_head(
    encoder: ImageEncoder, package: str
) -> tuple[ResNet | VisionTransformer, list[nn.Module]]:
    """Return torchvision's network and its last layer, if any: the projection head's, or the layer that whitens.

    Raises ``ConfigError``, which names the package to export to, unless the network is torchvision's.
    """
    network, layers = encoder.network, list[nn.Module]()
    if encoder.spec.projection_head is not None:
        network, head = network.children()
        layers = list(head.children())
    _check(encoder.spec, package)
    assert isinstance(network, ResNet | VisionTransformer)
    if encoder.spec.whitened:
        layers = [getattr(network, last_layer(encoder.spec.name))]
    return network, layers


def weights_of(network: nn.Module, layers: list[nn.Module], last: str) -> dict[str, Tensor]:
    """Return the weights of a network, and of its head under the name of the last layer."""
    replaced = ("fc.", "heads.")  # the layer that whitens
    weights = {name: value for name, value in network.state_dict().items() if not name.startswith(replaced)}
    weights |= {f"{last}.{name}": value for layer in layers for name, value in layer.state_dict().items()}
    return {name: value.detach().cpu() for name, value in weights.items()}


def _check(spec: ImageEncoderSpec, package: str) -> None:
    """Raise ``ConfigError`` unless torchvision's parts can build the encoder."""
    num_layers = spec.projection_head.num_layers if spec.projection_head else 0
    cause = None
    if spec.name not in (*RESNETS, *VITS):
        cause = f"the network {spec.name} is your own"
    elif spec.norm != "batch":
        cause = f"{spec.norm} normalization replaces {spec.name}'s BatchNorm"
    # The state dict of a deeper head would look like its last layer.
    elif num_layers > 1:
        cause = f"the projection head has {num_layers} layers, and a network of {package} one at most"
    if cause is not None:
        raise ConfigError(f"cannot export to {package}: {cause}; load it with raycl.load_encoder instead")


def _source(
    spec: ImageEncoderSpec, network: nn.Module, layers: list[nn.Module], arguments: dict[str, Any]
) -> str:
    """Return a program that builds the network from torchvision's parts."""
    if isinstance(network, VisionTransformer):
        first = "torchvision.models.VisionTransformer"
        parts: dict[str, Any] = {"conv_proj": network.conv_proj} | (
            {} if layers else {"heads": nn.Identity()}
        )
        values = ", ".join(f"{name}={value}" for name, value in arguments.items())
        definition, construction = "", f"{first}({values})"
    else:
        assert isinstance(network, ResNet)
        kind, depths = RESNETS[spec.name]
        widths = {64 * 2**n: _width(getattr(network, f"layer{n + 1}")) for n in range(4)}
        definition = _RESNET.format(widths=widths, stem=network.conv1.out_channels)
        construction = f"Encoder(resnet.{BLOCKS[kind].__name__}, {depths})"
        parts = {"conv1": network.conv1, "bn1": network.bn1, "maxpool": network.maxpool}
        parts["fc"] = layers[0] if layers else nn.Identity()
    replaced = "\n".join(f"    network.{name} = nn.{part}" for name, part in parts.items())
    return _MODEL.format(
        spec=spec, weights=WEIGHTS, definition=definition, construction=construction, replaced=replaced
    )


def _width(layer: Any) -> int:
    """Return the output channels of a layer's first convolution."""
    return layer[0].conv1.out_channels


def _arguments(network: nn.Module) -> dict[str, Any]:
    """Return the arguments of the same network in torchvision; the name of a ResNet implies them."""
    if not isinstance(network, VisionTransformer):
        return {}
    layers = network.encoder.layers
    return {
        "image_size": network.image_size,
        "patch_size": network.patch_size,
        "num_layers": len(layers),
        "num_heads": layers[0].num_heads,  # pyright: ignore[reportArgumentType, reportIndexIssue]
        "hidden_dim": network.hidden_dim,
        "mlp_dim": network.mlp_dim,
    }


def _fits(name: str, arguments: dict[str, Any], weights: dict[str, Tensor], last: str) -> bool:
    """Whether a network of torchvision has exactly these weights, with or without its last layer."""
    build = getattr(torchvision.models, name, None)
    if build is None or not (name in RESNETS or build is VisionTransformer):
        return False
    with torch.device("meta"):  # skips the initialization
        theirs = build(**arguments).state_dict()
    if f"{last}.weight" not in weights:
        theirs = {each: value for each, value in theirs.items() if not each.startswith(f"{last}.")}
    return {n: v.shape for n, v in theirs.items()} == {n: v.shape for n, v in weights.items()}
