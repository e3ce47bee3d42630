"""Image encoders: torchvision's ResNets and ViTs, with variants for small images."""

from collections.abc import Mapping
from typing import Any, Literal, cast, final

import torch
from torch import Tensor, nn

from raycl.errors import ConfigError
from raycl.models.custom import build_network, output_dim
from raycl.models.registry import RESNETS, VITS, check_encoder_name
from raycl.models.vision import BasicBlock, Bottleneck, ResNet, VisionTransformer
from raycl.models.whitening import identity_layer

Stem = Literal["auto", "small", "half", "standard"]
SMALL = 64  # pixels: "auto" means the small stem up to this size

BLOCKS: dict[str, type[BasicBlock | Bottleneck]] = {"basic": BasicBlock, "bottleneck": Bottleneck}


def build_image_encoder(
    name: str,
    *,
    image_size: int,
    channels: int = 3,
    stem: Stem = "auto",
    width: float = 1.0,
    arguments: Mapping[str, Any] | None = None,
    whitened_dim: int | None = None,
) -> nn.Module:
    """Build an untrained encoder: images [batch, channels, size, size] to representations.

    ``name`` is a ResNet, a ViT, or ``package.module:function`` for your own, called with ``arguments``.
    The small stem is a 3x3 convolution without pooling, the half stem the same with stride 2 (a quarter
    of the work); a ViT takes patches of 4 or 8 instead of 16 pixels.
    ``width`` multiplies the channels. With ``whitened_dim``, the width of its representations, it has a last linear
    layer, see :class:`~raycl.models.whitening.Whitening`. Raises ``ConfigError`` for an unknown name.
    """
    check_encoder_name(name, is_text=False)
    if ":" in name:
        return build_network(name, **(arguments or {}))
    if arguments:
        raise ConfigError(f"encoder.kwargs apply to your own encoder only, came {dict(arguments)} for {name}")
    if stem == "auto":
        stem = "small" if image_size <= SMALL else "standard"
    if name in VITS:
        standard = 32 if name.endswith("_32") else 16
        patch = {"small": 4, "half": 8}.get(stem, standard)
        network: nn.Module = _build_vit(name, image_size, channels, patch, width)
    else:
        block, layers = RESNETS[name]
        network = _ScaledResNet(BLOCKS[block], list(layers), width=width, channels=channels, stem=stem)
    if whitened_dim is not None:
        setattr(network, last_layer(name), identity_layer(whitened_dim))
    return network


def last_layer(name: str) -> str:
    """Return the name of the last layer of a ResNet or ViT, which is the identity unless it is whitened."""
    return "heads" if name in VITS else "fc"


def representation_dim(
    encoder: nn.Module, *, image_size: int, channels: int, setting: str = "data.image_size"
) -> int:
    """Return the width of an encoder's output; raises ``ConfigError`` unless it is [batch, dim].

    An error names ``setting``, the origin of the size.
    """
    shape = f"[batch, {channels}, {image_size}, {image_size}]"
    inputs = f"images {shape} (data.channels, {setting}) in channels_last"
    return output_dim(encoder, image_example(image_size=image_size, channels=channels), inputs=inputs)


def image_example(*, image_size: int, channels: int) -> Tensor:
    """Return an image [1, channels, image_size, image_size], channels_last as views are, to try an encoder."""
    shape = (1, channels, image_size, image_size)
    return torch.empty(shape, memory_format=torch.channels_last).zero_()


@final
class _ScaledResNet(ResNet):
    """torchvision's ResNet with every width multiplied and, for small images, a 3x3 stem."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        layers: list[int],
        *,
        width: float,
        channels: int,
        stem: Stem,
    ) -> None:
        self._width = width
        self._stem_width = _scaled(64, width)
        super().__init__(block, layers)
        kernel, stride = {"standard": (7, 2), "half": (3, 2), "small": (3, 1)}[stem]
        self.conv1 = nn.Conv2d(
            channels, self._stem_width, kernel, stride=stride, padding=kernel // 2, bias=False
        )
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")
        self.bn1 = nn.BatchNorm2d(self._stem_width)
        if stem != "standard":
            self.maxpool = nn.Identity()  # type: ignore[assignment]
        self.fc = nn.Identity()  # type: ignore[assignment]

    def _make_layer(self, block: Any, planes: int, *args: Any, **kwargs: Any) -> nn.Sequential:
        if planes == 64:  # the first layer: its input is the stem's output
            self.inplanes = self._stem_width
        return super()._make_layer(block, _scaled(planes, self._width), *args, **kwargs)


def _build_vit(name: str, image_size: int, channels: int, patch: int, width: float) -> nn.Module:
    num_layers, num_heads, hidden = VITS[name]
    if image_size % patch:
        raise ConfigError(
            f"{name} cuts images into patches of {patch} pixels, came data.image_size={image_size}; choose a multiple"
        )
    hidden = max(num_heads * 8, round(hidden * width / (num_heads * 8)) * num_heads * 8)
    vit = VisionTransformer(image_size, patch, num_layers, num_heads, hidden, 4 * hidden)
    if channels != 3:
        vit.conv_proj = nn.Conv2d(channels, hidden, patch, stride=patch)
        # As torchvision does for 3.
        nn.init.trunc_normal_(vit.conv_proj.weight, std=(channels * patch**2) ** -0.5)
        nn.init.zeros_(cast("nn.Parameter", vit.conv_proj.bias))
    vit.heads = nn.Identity()  # type: ignore[assignment]
    return vit


def _scaled(planes: int, width: float) -> int:
    """Scale a width to a multiple of eight, which suits vector units."""
    return max(8, round(planes * width / 8) * 8)
