"""raycl's functions refuse arguments of other types in one line, before anything starts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import raycl
from raycl.errors import ConfigError

CONFIG = raycl.recipe("simclr", image_size=32)
REFUSED: dict[str, tuple[Callable[[Any], Any], Any, str]] = {
    "recipe": (raycl.recipe, None, "recipe must be text, came None of type NoneType"),
    "image size, text": (
        lambda given: raycl.recipe("simclr", image_size=given),
        "32",
        "image_size must be a whole number, came '32' of type str",
    ),
    "image size, fraction": (
        lambda given: raycl.recipe("simclr", image_size=given),
        32.0,
        "image_size must be a whole number, came 32.0 of type float",
    ),
    "image size, flag": (
        lambda given: raycl.recipe("simclr", image_size=given),
        True,
        "image_size must be a whole number, came True of type bool",
    ),
    "YAML": (raycl.config_from_yaml, 5, "the YAML must be text, came 5"),
    "configuration to write": (raycl.config_to_yaml, "simclr", "config must be a RunConfig, came 'simclr'"),
    "configuration": (
        lambda given: raycl.override(given, {}),
        "simclr",
        "config must be a RunConfig, came 'simclr'",
    ),
    "settings": (
        lambda given: raycl.override(CONFIG, given),
        5,
        "settings must be a dict or a list of key.path=value, came 5",
    ),
    "setting": (lambda given: raycl.override(CONFIG, given), [5], "a setting must be text, came 5"),
    "path of a setting": (
        lambda given: raycl.override(CONFIG, given),
        {1: 2},
        "a setting's path must be text, came 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_an_argument_of_another_type_is_refused_in_one_line(name: str) -> None:
    call, given, message = REFUSED[name]
    with pytest.raises(ConfigError) as caught:
        call(given)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_an_image_size_of_numpy_is_a_whole_number() -> None:
    size: Any = np.int64(32)
    assert raycl.recipe("simclr", image_size=size) == CONFIG


def test_one_setting_need_not_be_in_a_list() -> None:
    assert raycl.override(CONFIG, "seed=7").seed == 7
