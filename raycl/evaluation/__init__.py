"""Judge what was learned: neighbors and, in ``raycl.evaluation.linear``, a linear probe.

``linear_accuracy`` is not among the names here: its scikit-learn takes seconds to import, which
periodic judging by neighbors must not pay for. ``from raycl.evaluation.linear import
linear_accuracy``.
"""

from raycl.evaluation.knn import knn_accuracy, knn_predict, nearest

__all__ = ["knn_accuracy", "knn_predict", "nearest"]
