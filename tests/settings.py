"""Settings that several recipes share."""

from collections.abc import Mapping
from typing import Any

from raycl.config import RunConfig
from raycl.config.overrides import override
from raycl.errors import ConfigError


def override_active(
    config: RunConfig, optional: Mapping[str, Any], settings: Mapping[str, Any] | None = None
) -> RunConfig:
    """Replace settings; those of ``optional`` that have no effect in this run are skipped."""
    settings = settings or {}
    given = {**optional, **settings}
    while True:
        try:
            return override(config, given)
        except ConfigError as error:
            name, _, reason = str(error).partition(" ")
            skipped = next((path for path in given if f"{name}.".startswith(f"{path}.")), None)
            if skipped is None or skipped in settings or not reason.startswith("acts only with"):
                raise
            del given[skipped]
