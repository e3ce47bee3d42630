"""Settings that several recipes share."""

from collections.abc import Mapping
from typing import Any

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError


def override_active(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Override the settings that are active in this run, and skip the others."""
    left = dict(settings)
    while True:
        try:
            return override(config, left)
        except ConfigError as error:
            name, _, reason = str(error).partition(" ")
            given = next((path for path in left if f"{name}.".startswith(f"{path}.")), None)
            if given is None or not reason.startswith("acts only with"):
                raise
            del left[given]
