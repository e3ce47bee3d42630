"""What ``raycl doctor`` does: plans the recipe as ``raycl train`` would, and prints what was found."""

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from raycl.api import doctor_request

if TYPE_CHECKING:
    from raycl.doctor import CheckResult


def report(recipe: str | None, flags: Mapping[str, Any], *, as_json: bool, **options: Any) -> bool:
    """Print the findings, each as it comes or all as JSON; return whether all are good."""
    from raycl.doctor import examinations

    findings: list[CheckResult] = []
    for finding in examinations(doctor_request(recipe, flags, **options)):
        findings.append(finding)
        if not as_json:
            print(finding, flush=True)
    if as_json:
        print(json.dumps([vars(finding) for finding in findings]))
    return all(finding.good for finding in findings)
