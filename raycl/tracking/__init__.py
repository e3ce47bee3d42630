"""Trackers of experiments: TensorBoard, MLflow, Weights & Biases. Training never waits for one, nor fails by one."""

from raycl.tracking.point import Point, Tracker
from raycl.tracking.trackers import Trackers, check_trackers, open_trackers

__all__ = ["Point", "Tracker", "Trackers", "check_trackers", "open_trackers"]
