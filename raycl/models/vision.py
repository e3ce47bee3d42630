"""torchvision's networks, imported without torch's compiler."""

import contextlib

from raycl.eager_torch import without_compiler

# Another version may ask the compiler for more: it is imported again below.
with contextlib.suppress(ImportError, AttributeError), without_compiler():
    import torchvision  # noqa: F401

from torchvision.models import VisionTransformer
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.models.vision_transformer import EncoderBlock

__all__ = ["BasicBlock", "Bottleneck", "EncoderBlock", "ResNet", "VisionTransformer"]
