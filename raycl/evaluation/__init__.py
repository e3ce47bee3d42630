"""Evaluation of encoders: kNN, linear probe, retrieval and sentence similarity.

``linear_accuracy`` must be imported from ``raycl.evaluation.linear``: its scikit-learn takes seconds to
import, which periodic kNN evaluation should not pay for.
"""

from raycl.evaluation.knn import knn_accuracy, knn_predict, nearest

__all__ = ["knn_accuracy", "knn_predict", "nearest"]
