"""Recipes: functions that return a run's configuration for an image size."""

from collections.abc import Callable

from raycl.arguments import check_type
from raycl.config import RunConfig
from raycl.config.overrides import override, present_name
from raycl.errors import ConfigError
from raycl.recipes.images import (
    dcl,
    for_cpu,
    for_gray,
    instance_discrimination,
    moco_v1,
    moco_v2,
    moco_v3,
    nnclr,
    simclr,
    sogclr,
    supcon,
)
from raycl.recipes.like import LIKE
from raycl.recipes.texts import clip, esimcse, of_words, siglip, simcse, two_tower

RECIPES: dict[str, Callable[[int], RunConfig]] = {
    "simclr": simclr,
    "dcl": dcl,
    "sogclr": sogclr,
    "supcon": supcon,
    "moco_v1": moco_v1,
    "moco_v2": moco_v2,
    "moco_v3": moco_v3,
    "nnclr": nnclr,
    "instance_discrimination": instance_discrimination,
    "simcse": simcse,
    "esimcse": esimcse,
    "two_tower": two_tower,
    "clip": clip,
    "siglip": siglip,
}


def recipe(name: str, *, image_size: int = 224, gray: bool = False, on_cpu: bool = False) -> RunConfig:
    """Return the configuration of recipe ``name`` for images of ``image_size`` pixels, 8 to 1024.

    ``name`` may be a configuration of another library, such as ``lightly:simclr``. ``on_cpu`` replaces the papers'
    encoder of small images by a smaller one with its views and optimizer, and that of sentences by a bag of subwords;
    ``gray`` replaces the views of small photographs by those of glyphs, which captioned images ignore. Pairs and other
    libraries ignore both. Raises ``ConfigError`` for an unknown name or an invalid size.
    """
    check_type("recipe", name, str)
    check_type("image_size", image_size, int)
    if new := present_name(f"recipe={name}"):
        raise ConfigError(f"unknown recipe {name!r}; it is now {new.removeprefix('recipe=')}")
    if ":" in name:
        base, settings = LIKE[check_like(name)]
        return override(recipe(base, image_size=image_size), settings).model_copy(update={"recipe": name})
    if name not in RECIPES:
        raise ConfigError(f"unknown recipe {name!r}; there are {', '.join(RECIPES)}, or give a .yaml file")
    if not 8 <= image_size <= 1024:
        raise ConfigError(f"image_size must be from 8 to 1024 pixels, got {image_size}")
    config = RECIPES[name](int(image_size))
    if config.data.kind == "text" and on_cpu:
        return of_words(config)
    if config.data.kind == "pairs":
        return config
    config = for_cpu(config) if on_cpu else config
    return for_gray(config) if gray and config.data.kind == "image" else config


def check_like(name: str) -> str:
    """Return the name of another library's configuration; raises ``ConfigError`` for an unknown one."""
    if name not in LIKE:
        raise ConfigError(f"unknown configuration {name!r} of another library; there are {', '.join(LIKE)}")
    return name


def recipe_like(recipe: str | None, like: str | None) -> str:
    """Return the name of the recipe to train; raises ``ConfigError`` unless ``recipe`` and ``like`` agree."""
    if like is None:
        if recipe is None:
            raise ConfigError(f"give a recipe, or --like with one of {', '.join(LIKE)}")
        return recipe
    base = LIKE[check_like(like)][0]
    if recipe not in (None, base, like):
        raise ConfigError(f"--like {like} trains recipe {base}, got recipe {recipe}; remove one of them")
    return like
