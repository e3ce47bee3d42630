"""What ``raycl doctor`` does: plans the recipe as ``raycl train`` would, and prints what was found."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from raycl.errors import ConfigError, DataError, StorageError

if TYPE_CHECKING:
    from raycl.config import RunConfig
    from raycl.doctor import Finding

IMAGE_SIZE = 224  # that of a recipe whose images nobody could look at


def report(
    recipe: str | None,
    flags: Mapping[str, Any],
    *,
    settings: Sequence[str],
    data: str | None,
    as_json: bool,
    **options: Any,
) -> bool:
    """Print the findings, each as it comes or all as JSON; return whether all are good."""
    from raycl.doctor import Request, examinations

    options |= {"data": data} | _what_to_read(recipe, flags, data, settings)
    findings: list[Finding] = []
    for finding in examinations(Request(**options)):
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    return all(finding.good for finding in findings)


def _what_to_read(
    recipe: str | None, flags: Mapping[str, Any], data: str | None, settings: Sequence[str]
) -> dict[str, Any]:
    if recipe is not None:
        return {"recipe": plan(recipe, flags, data, settings)}
    if flags:
        raise ConfigError(
            "--workers, --gpu and --batch-size are a recipe's: name one, for example raycl doctor simclr"
        )
    from raycl.setup import column_settings

    return {"columns": column_settings(settings)}


def plan(recipe: str, flags: Mapping[str, Any], data: str | None, settings: Sequence[str]) -> "RunConfig":
    """Return the run that ``raycl train`` would make of it; without readable data, for images of 224 pixels.

    Raises ``ConfigError``; what is wrong with the data is found when they are looked at.
    """
    from raycl.setup import plan_run

    if data is not None or recipe.endswith((".yaml", ".yml")):
        try:
            return plan_run(recipe, data=data or "", flags=flags, settings=settings)
        except (DataError, StorageError):
            if data is None:
                raise  # it is the file that cannot be read
    # The setting comes first: one that was given replaces it.
    return plan_run(recipe, data="", flags=flags, settings=[f"data.image_size={IMAGE_SIZE}", *settings])
