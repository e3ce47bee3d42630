"""``raycl doctor``: check a cluster and a recipe, and print the results."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raycl.api import doctor_request

if TYPE_CHECKING:
    from raycl.doctor import CheckResult


def report(recipe: str | None, flags: Mapping[str, Any], *, as_json: bool, **options: Any) -> bool:
    """Print each result when it is ready, or all as JSON; return whether all checks passed."""
    from raycl.doctor import examinations

    results: list[CheckResult] = []
    for result in examinations(doctor_request(recipe, flags, **options)):
        results.append(result)
        if not as_json:
            print(result, flush=True)
    if as_json:
        print(json.dumps([vars(result) for result in results]))
    return all(result.good for result in results)
