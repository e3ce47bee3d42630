"""Recipes: functions of the image size that return a whole run as a value."""

from collections.abc import Callable

from raycl.config import RunConfig
from raycl.config.overrides import present_name
from raycl.errors import ConfigError
from raycl.recipes.images import instance_discrimination, moco_v1, moco_v2, simclr
from raycl.recipes.texts import clip, esimcse, simcse, two_tower

RECIPES: dict[str, Callable[[int], RunConfig]] = {
    "simclr": simclr,
    "moco_v1": moco_v1,
    "moco_v2": moco_v2,
    "instance_discrimination": instance_discrimination,
    "simcse": simcse,
    "esimcse": esimcse,
    "two_tower": two_tower,
    "clip": clip,
}


def recipe(name: str, *, image_size: int = 224) -> RunConfig:
    """Return the run called ``name`` for images of ``image_size`` pixels.

    Raises ``ConfigError`` naming the recipes that exist.
    """
    if new := present_name(f"recipe={name}"):
        raise ConfigError(f"unknown recipe {name!r}; it is now {new.removeprefix('recipe=')}")
    if name not in RECIPES:
        raise ConfigError(
            f"unknown recipe {name!r}; there are {', '.join(RECIPES)}, or give a file ending in .yaml"
        )
    if not 8 <= image_size <= 1024:
        raise ConfigError(f"image sizes go from 8 to 1024 pixels, came {image_size}")
    return RECIPES[name](image_size)
