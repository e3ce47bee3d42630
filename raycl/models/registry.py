"""Names known without torch: of the encoders that raycl has itself, and of the files of a saved one."""

import difflib
from typing import Literal, get_args

from raycl.errors import ConfigError

# Kind of block, and blocks in each layer.
RESNETS: dict[str, tuple[Literal["basic", "bottleneck"], tuple[int, int, int, int]]] = {
    "resnet10": ("basic", (1, 1, 1, 1)),
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
}
# Layers, heads, hidden width: DeiT's tiny and small, ViT's base and large.
VITS: dict[str, tuple[int, int, int]] = {
    "vit_tiny": (12, 3, 192),
    "vit_small": (12, 6, 384),
    "vit_base": (12, 12, 768),
    "vit_large": (24, 16, 1024),
}
TEXT_ENCODERS = ("transformer", "bag_of_subwords")
HUGGING_FACE = "transformers:"

WEIGHTS = "encoder.safetensors"
HEAD_WEIGHTS = "projection_head.safetensors"
SPEC = "encoder.json"
TOKENIZER = "tokenizer.json"
KEY = "key"


SideName = Literal["query", "key"]


def check_side(side: SideName) -> SideName:
    """Return the side; raises ``ConfigError`` if no encoder has it."""
    if side not in get_args(SideName):
        raise ConfigError(f"there is no side {side!r} of an encoder; give query or key")
    return side


def check_encoder_name(name: str, *, is_text: bool, key: str = "encoder.name") -> None:
    """Raise ``ConfigError`` unless raycl has the encoder; ``package.module:function`` is the user's own."""
    known = TEXT_ENCODERS if is_text else (*RESNETS, *VITS)
    if ":" in name or name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    allowed = [*known, f"{HUGGING_FACE}PATH"] if is_text else known
    raise ConfigError(
        f"unknown {key} {name!r}; there are {', '.join(allowed)}, or package.module:function for your own{hint}"
    )
