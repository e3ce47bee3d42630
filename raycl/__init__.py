"""raycl: contrastive learning that runs on a Ray cluster.

Public names are imported on first use, so that data tasks do not load torch and Ray Train.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raycl import losses
    from raycl.api import (
        certify,
        check_certificate,
        evaluate,
        find_steps,
        replay,
        run_doctor,
        train,
        tune,
        write_report,
    )
    from raycl.config import RunConfig, Stage
    from raycl.config.overrides import config_from_yaml, config_to_yaml, override
    from raycl.data.columns import ColumnNames
    from raycl.errors import RayclError
    from raycl.inference.embed import embed_to_parquet as embed
    from raycl.inference.encoder import load_encoder
    from raycl.inference.export import export_encoder
    from raycl.inference.mining import mine_negatives as mine
    from raycl.negatives.bank import connect_bank, list_banks
    from raycl.recipes import recipe
    from raycl.report.listing import list_runs
    from raycl.training.launch import RunResult

    __version__: str

_HOME = {
    "ColumnNames": "raycl.data.columns:ColumnNames",
    "RayclError": "raycl.errors:RayclError",
    "RunConfig": "raycl.config:RunConfig",
    "RunResult": "raycl.training.launch:RunResult",
    "Stage": "raycl.config:Stage",
    "certify": "raycl.api:certify",
    "check_certificate": "raycl.api:check_certificate",
    "config_from_yaml": "raycl.config.overrides:config_from_yaml",
    "config_to_yaml": "raycl.config.overrides:config_to_yaml",
    "connect_bank": "raycl.negatives.bank:connect_bank",
    "embed": "raycl.inference.embed:embed_to_parquet",
    "evaluate": "raycl.api:evaluate",
    "export_encoder": "raycl.inference.export:export_encoder",
    "find_steps": "raycl.api:find_steps",
    "list_banks": "raycl.negatives.bank:list_banks",
    "list_runs": "raycl.report.listing:list_runs",
    "load_encoder": "raycl.inference.encoder:load_encoder",
    "mine": "raycl.inference.mining:mine_negatives",
    "override": "raycl.config.overrides:override",
    "recipe": "raycl.recipes:recipe",
    "replay": "raycl.api:replay",
    "run_doctor": "raycl.api:run_doctor",
    "train": "raycl.api:train",
    "tune": "raycl.api:tune",
    "write_report": "raycl.api:write_report",
}
_MODULES = ("losses",)

__all__ = [
    "ColumnNames",
    "RayclError",
    "RunConfig",
    "RunResult",
    "Stage",
    "certify",
    "check_certificate",
    "config_from_yaml",
    "config_to_yaml",
    "connect_bank",
    "embed",
    "evaluate",
    "export_encoder",
    "find_steps",
    "list_banks",
    "list_runs",
    "load_encoder",
    "losses",
    "mine",
    "override",
    "recipe",
    "replay",
    "run_doctor",
    "train",
    "tune",
    "write_report",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in _MODULES:
        return importlib.import_module(f"raycl.{name}")
    if name not in _HOME:
        raise AttributeError(f"module 'raycl' has no attribute {name!r}")
    module, _, attribute = _HOME[name].partition(":")
    return getattr(importlib.import_module(module), attribute)


def __dir__() -> list[str]:
    return __all__


def _version() -> str:
    """Return the installed version, or ``unknown`` for files that are not installed, as in a Ray job."""
    from importlib import metadata

    try:
        return metadata.version("raycl")
    except metadata.PackageNotFoundError:
        return "unknown"
