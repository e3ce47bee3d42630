"""torchvision's networks, imported without ``torch._dynamo``, which takes more time than all the rest of torchvision.

torchvision asks it for one function, in an operation on boxes that no network here has.
"""

import contextlib
import sys
from types import ModuleType
from typing import Any

_DYNAMO = "torch._dynamo.utils"


def _is_compile_supported(device_type: Any) -> bool:
    from torch._dynamo import utils

    return utils.is_compile_supported(device_type)


if _DYNAMO not in sys.modules:
    _stub: Any = ModuleType(_DYNAMO)
    _stub.is_compile_supported = _is_compile_supported
    sys.modules[_DYNAMO] = _stub
    try:
        # Another version may ask for more: it is imported again below.
        with contextlib.suppress(ImportError, AttributeError):
            import torchvision  # noqa: F401
    finally:
        del sys.modules[_DYNAMO]

from torchvision.models import VisionTransformer  # noqa: E402
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet  # noqa: E402
from torchvision.models.vision_transformer import EncoderBlock  # noqa: E402

__all__ = ["BasicBlock", "Bottleneck", "EncoderBlock", "ResNet", "VisionTransformer"]
