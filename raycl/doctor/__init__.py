"""The doctor: are this cluster, this storage, these data and this recipe ready for a run?

Names are loaded when they are first used: the tasks that look at each node import one small module of
this room, and must not pay for torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl.doctor.examination import Request, examinations, examine
    from raycl.doctor.finding import Finding

_HOME = {
    "Finding": "finding",
    "Request": "examination",
    "examinations": "examination",
    "examine": "examination",
}

__all__ = ["Finding", "Request", "examinations", "examine"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'raycl.doctor' has no attribute {name!r}")
    return getattr(importlib.import_module(f"raycl.doctor.{_HOME[name]}"), name)
