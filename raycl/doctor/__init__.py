"""The doctor: checks whether a cluster, its storage, the data and a recipe are ready for a run.

Names are loaded on first use: tasks on every node import only ``raycl.doctor.nodes`` and must not load torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl.doctor.result import CheckResult
    from raycl.doctor.run import DoctorRequest, examinations

__all__ = ["CheckResult", "DoctorRequest", "examinations"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'raycl.doctor' has no attribute {name!r}")
    module = "result" if name == "CheckResult" else "run"
    return getattr(importlib.import_module(f"raycl.doctor.{module}"), name)
