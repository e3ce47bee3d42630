"""Encoder names, encoder file names and trusted packages; imports no torch."""

import difflib
import os
from collections.abc import Collection
from typing import Literal, get_args

from raycl.errors import ConfigError
from raycl.records import DATA, read_object
from raycl.storage import Place

# Kind of block, and blocks in each layer.
RESNETS: dict[str, tuple[Literal["basic", "bottleneck"], tuple[int, int, int, int]]] = {
    "resnet10": ("basic", (1, 1, 1, 1)),
    "resnet18": ("basic", (2, 2, 2, 2)),
    "resnet34": ("basic", (3, 4, 6, 3)),
    "resnet50": ("bottleneck", (3, 4, 6, 3)),
    "resnet101": ("bottleneck", (3, 4, 23, 3)),
    "resnet152": ("bottleneck", (3, 8, 36, 3)),
}
# Layers, heads, hidden width: DeiT's tiny and small, ViT's base and large. ViT-B/32 has larger patches.
VITS: dict[str, tuple[int, int, int]] = {
    "vit_tiny": (12, 3, 192),
    "vit_small": (12, 6, 384),
    "vit_base": (12, 12, 768),
    "vit_base_32": (12, 12, 768),
    "vit_large": (24, 16, 1024),
}
TEXT_ENCODERS = ("transformer", "bag_of_subwords")
HUGGING_FACE = "transformers:"
OWN = "a network of the user's own"  # the name in encoder.json of a module passed to raycl.train
OWN_NETWORK = "own_network"  # true in data.json if one was passed
TRUSTED = "RAYCL_TRUSTED"

WEIGHTS = "encoder.safetensors"
HEAD_WEIGHTS = "projection_head.safetensors"
SPEC = "encoder.json"
TOKENIZER = "tokenizer.json"
KEY = "key"
_OF_EACH = (WEIGHTS, HEAD_WEIGHTS, SPEC)
ENCODER_FILES = (*_OF_EACH, *(f"{KEY}/{name}" for name in _OF_EACH))  # of a run; all that may exist

SideName = Literal["query", "key"]


def check_side(side: SideName) -> SideName:
    """Return the side; raises ``ConfigError`` unless it is ``query`` or ``key``."""
    if side not in get_args(SideName):
        raise ConfigError(f"unknown side {side!r} of an encoder; give query or key")
    return side


def trained_own_network(output: Place) -> bool:
    """Return whether the run at ``output`` trained a network of its user's own, which no name builds.

    Runs of earlier versions record it only at their end. Raises ``DataError`` for a damaged file.
    """
    records = (DATA, OWN_NETWORK, True), (SPEC, "name", OWN)
    return any(
        (output / file).exists() and read_object(output / file).get(key) == value
        for file, key, value in records
    )


def is_transformer(name: str) -> bool:
    """Return whether a network that raycl builds by this name has transformer blocks."""
    return name in VITS or name == "transformer" or name.startswith(HUGGING_FACE)


def has_blocks(name: str) -> bool:
    """Return whether a network that raycl builds by this name has residual blocks."""
    return name in RESNETS or is_transformer(name)


def check_encoder_name(name: str, *, is_text: bool, key: str = "encoder.name") -> None:
    """Raise ``ConfigError`` for an unknown encoder name; any ``package.module:function`` passes."""
    known = TEXT_ENCODERS if is_text else (*RESNETS, *VITS)
    if ":" in name or name in known:
        return
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]}?" if close else ""
    allowed = [*known, f"{HUGGING_FACE}PATH"] if is_text else known
    raise ConfigError(
        f"unknown {key} {name!r}; there are {', '.join(allowed)}, or package.module:function for your own{hint}"
    )


def trusted_packages() -> tuple[str, ...]:
    """Return the packages in RAYCL_TRUSTED, a comma-separated list."""
    return tuple(name.strip() for name in os.environ.get(TRUSTED, "").split(",") if name.strip())


def check_trusted(name: str, where: str, trusted: Collection[str] | None = None, *, is_text: bool) -> None:
    """Raise ``ConfigError`` if the file ``where`` names code outside the ``trusted`` packages.

    ``trusted`` None stands for the packages in RAYCL_TRUSTED.
    """
    if ":" not in name or name == OWN or (is_text and name.startswith(HUGGING_FACE)):
        return
    module = name.partition(":")[0]
    allowed = trusted_packages() if trusted is None else trusted
    if not any(f"{module}.".startswith(f"{package}.") for package in allowed):
        raise ConfigError(
            f"{where} asks to import {module!r} and call {name!r}; if you trust its author, "
            f"set {TRUSTED}={module.partition('.')[0]}"
        )
