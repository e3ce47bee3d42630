"""Trackers of experiments: TensorBoard, MLflow, Weights & Biases. Training never waits for one, nor fails by one."""

from raycl.tracking.base import MetricsRecord, Tracker
from raycl.tracking.trackers import Trackers, check_trackers, open_trackers

__all__ = ["MetricsRecord", "Tracker", "Trackers", "check_trackers", "open_trackers"]
