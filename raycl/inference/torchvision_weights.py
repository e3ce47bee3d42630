"""An encoder of images as weights that a network of torchvision takes."""

import io
import json
from typing import Any

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import VisionTransformer

from raycl.errors import ConfigError
from raycl.models.names import RESNETS
from raycl.models.saved import ImageEncoder

WEIGHTS = "weights.pth"
ARCHITECTURE = "architecture.json"


def torchvision_files(encoder: ImageEncoder) -> dict[str, bytes]:
    """Return the weights in torchvision's names, and which of its networks takes them.

    A projection head of one layer is the last layer there. Without one there is no last layer, and
    the representation is what would go into it. ``architecture.json`` names the network with its
    arguments, and how its images are prepared. Raises ``ConfigError`` if torchvision has none.
    """
    spec, network, layers = encoder.spec, encoder.network, list[nn.Module]()
    if spec.projection_head is not None:
        network, head = network.children()
        layers = list(head.children())
    last = "heads.head" if isinstance(network, VisionTransformer) else "fc"
    weights = dict(network.state_dict())
    weights |= {f"{last}.{name}": value for layer in layers for name, value in layer.state_dict().items()}
    arguments = _arguments(network) | ({"num_classes": spec.representation_dim} if layers else {})
    name = "VisionTransformer" if isinstance(network, VisionTransformer) else spec.name
    # One layer at most: of more, the names and shapes above would be those of the last one alone.
    if len(layers) > 1 or not _takes(name, arguments, weights, last):
        raise ConfigError(
            f"torchvision has no network like this {spec.name} (stem {spec.stem!r}, width {spec.width:g}, "
            f"{spec.channels} channels, norm {spec.norm!r}, {len(layers)} layers of a head); "
            "load it with raycl.load_encoder"
        )
    architecture = {
        "network": f"torchvision.models.{name}",
        "arguments": arguments,
        "last_layer": last if layers else None,
        "image_size": spec.image_size,
        "mean": spec.mean,
        "std": spec.std,
    }
    file = io.BytesIO()
    torch.save({name: value.detach().cpu() for name, value in weights.items()}, file)
    return {WEIGHTS: file.getvalue(), ARCHITECTURE: (json.dumps(architecture, indent=2) + "\n").encode()}


def _arguments(network: nn.Module) -> dict[str, Any]:
    """Return what torchvision builds the same network with: nothing for a ResNet, its name says it."""
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


def _takes(name: str, arguments: dict[str, Any], weights: dict[str, Tensor], last: str) -> bool:
    """Return whether a network of torchvision has just these weights, its last layer left out or not."""
    build = getattr(torchvision.models, name, None)
    if build is None or not (name in RESNETS or build is VisionTransformer):
        return False
    with torch.device("meta"):  # its own weights are not wanted
        theirs = build(**arguments).state_dict()
    if f"{last}.weight" not in weights:
        theirs = {each: value for each, value in theirs.items() if not each.startswith(f"{last}.")}
    return {n: v.shape for n, v in theirs.items()} == {n: v.shape for n, v in weights.items()}
