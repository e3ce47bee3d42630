"""Export of image encoders to timm."""

import json
import re

import safetensors.torch
from torchvision.models import VisionTransformer
from torchvision.models.resnet import ResNet

from raycl.errors import ConfigError
from raycl.inference.export.torchvision import network_and_head, weights_of
from raycl.models.encoder_io import ImageEncoder
from raycl.models.specs import ImageEncoderSpec

_NAMES = {  # of a ViT's weights: in torchvision, and in timm
    r"^conv_proj\b": "patch_embed.proj",
    r"^class_token$": "cls_token",
    r"^encoder\.pos_embedding$": "pos_embed",
    r"^encoder\.ln\b": "norm",
    r"^encoder\.layers\.encoder_layer_(\d+)": r"blocks.\1",
    r"\bln_([12])\b": r"norm\1",
    r"\bself_attention\.in_proj_": "attn.qkv.",
    r"\bself_attention\.out_proj\b": "attn.proj",
    r"\bmlp\.0\b": "mlp.fc1",
    r"\bmlp\.3\b": "mlp.fc2",
}


def timm_files(encoder: ImageEncoder) -> dict[str, bytes]:
    """Return the weights under timm's names, and the configuration from which timm builds the network.

    A projection head of one layer becomes the classifier, as does the layer that whitens. Without either the network
    has no classifier and returns the representation. Raises ``ConfigError`` for a network that timm does not have.
    """
    network, layers = network_and_head(encoder, "timm")
    spec = encoder.spec
    is_vit = isinstance(network, VisionTransformer)
    _check(spec, network)
    last = "head" if is_vit else "fc"
    num_classes = spec.representation_dim if layers else 0
    weights = weights_of(network, layers, last)
    if is_vit:
        weights = {_name_in_timm(name): value for name, value in weights.items()}
    config = {
        "architecture": f"{spec.name.removesuffix('_32')}_patch16_224" if is_vit else spec.name,
        "num_classes": num_classes,
        "model_args": {"patch_size": network.patch_size, "embed_dim": network.hidden_dim} if is_vit else {},
        "pretrained_cfg": {
            "input_size": [spec.channels, spec.image_size, spec.image_size],
            "fixed_input_size": is_vit,
            # The whole image becomes a square, as when raycl embeds it.
            "crop_mode": "squash",
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": spec.mean,
            "std": spec.std,
            "num_classes": num_classes,
            "first_conv": "patch_embed.proj" if is_vit else "conv1",
            "classifier": last,
        },
    }
    return {
        "model.safetensors": safetensors.torch.save(
            {name: value.contiguous() for name, value in weights.items()}, {"format": "pt"}
        ),
        "config.json": (json.dumps(config, indent=2) + "\n").encode(),
    }


def _check(spec: ImageEncoderSpec, network: ResNet | VisionTransformer) -> None:
    """Raise ``ConfigError`` for a network that timm does not have."""
    cause = None
    if isinstance(network, VisionTransformer):
        return
    if spec.name == "resnet10":
        cause = "timm has no resnet10 like this"
    elif spec.width != 1:
        cause = f"timm has {spec.name} at width 1 only, this one has {spec.width:g}"
    elif network.conv1.kernel_size != (7, 7):
        cause = f"timm has {spec.name} with the stem for large images only"
    if cause is not None:
        raise ConfigError(
            f"cannot export to timm: {cause}; use --to torchvision, which writes the network too"
        )


def _name_in_timm(name: str) -> str:
    """Return the name in timm of a weight of torchvision's ViT."""
    for pattern, replacement in _NAMES.items():
        name = re.sub(pattern, replacement, name)
    return name
