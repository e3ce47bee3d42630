"""Helpers for tiled losses: tiny tiles, recorded tensor sizes, and counted products."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from torch import Tensor
from torch.overrides import TorchFunctionMode

from raycl.losses import tiled


@contextmanager
def tiny_tiles_in(*rooms: str) -> Iterator[None]:
    """Make tiles so small that a few rows fill several, in these loss modules."""
    with pytest.MonkeyPatch.context() as patch:
        for room in rooms:
            # Not by a path: the function hinge shadows its module.
            patch.setattr(sys.modules[f"raycl.losses.{room}"], "tile_size", lambda rows: 2, raising=False)
            patch.setattr(sys.modules[f"raycl.losses.{room}"], "BLOCK_ROWS", 3, raising=False)
        yield


def count_products(call: Callable[[], object], *rooms: str) -> int:
    """Return the number of matrix products of a call in these loss modules."""
    calls = []
    original = tiled.product

    def counted(*arguments: Any) -> Tensor:
        calls.append(1)
        return original(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        for room in rooms:
            # Not by a path: the function nce shadows its module.
            patch.setattr(sys.modules[f"raycl.losses.{room}"], "product", counted)
        call()
    return len(calls)


class MetricsLogger(TorchFunctionMode):
    """Record the size of the largest tensor and the called functions."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0
        self.functions: set[str] = set()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.functions.add(getattr(func, "__name__", str(func)))
        if isinstance(result, Tensor):
            self.largest = max(self.largest, result.untyped_storage().nbytes() // 4)
        return result
