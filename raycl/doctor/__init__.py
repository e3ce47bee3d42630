"""The doctor: are this cluster, this storage, these data and this recipe ready for a run?

Names are loaded when they are first used: the tasks that look at each node import one small module of
this room, and must not pay for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl.doctor.result import CheckResult
    from raycl.doctor.run import DoctorRequest, examinations, examine

_HOME = {
    "CheckResult": "result",
    "DoctorRequest": "run",
    "examinations": "run",
    "examine": "run",
}

__all__ = ["CheckResult", "DoctorRequest", "examinations", "examine"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raycl.doctor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raycl.doctor.{_HOME[name]}"), name)
