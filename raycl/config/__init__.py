"""The configuration of a run: frozen, validated values."""

from raycl.config.conditions import active_settings, flat, leaves
from raycl.config.run import RunConfig
from raycl.config.schema import (
    AugmentConfig,
    BankConfig,
    CheckpointConfig,
    Columns,
    DataConfig,
    EncoderConfig,
    EvaluationConfig,
    HeadConfig,
    MomentumEncoderConfig,
    MonitorConfig,
    NegativesConfig,
    OptimizerConfig,
    PredictionHeadConfig,
    TextAugmentConfig,
    TextConfig,
    ViewsConfig,
)
from raycl.config.stage import Stage

__all__ = [
    "AugmentConfig",
    "BankConfig",
    "CheckpointConfig",
    "Columns",
    "DataConfig",
    "EncoderConfig",
    "EvaluationConfig",
    "HeadConfig",
    "MomentumEncoderConfig",
    "MonitorConfig",
    "NegativesConfig",
    "OptimizerConfig",
    "PredictionHeadConfig",
    "RunConfig",
    "Stage",
    "TextAugmentConfig",
    "TextConfig",
    "ViewsConfig",
    "active_settings",
    "flat",
    "leaves",
]
