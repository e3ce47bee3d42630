"""torch without its compiler, whose import takes 1.5 s of each process.

torch and torchvision import ``torch._dynamo`` for a few functions that do nothing in a process that compiles nothing.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

_COMPILER = "torch._dynamo"


def _is_compile_supported(device_type: Any) -> bool:
    """torchvision keeps this function, so it asks the compiler itself."""
    from torch._dynamo import utils

    return utils.is_compile_supported(device_type)


@contextmanager
def without_compiler() -> Iterator[None]:
    """Replace the compiler by those functions, unless it is imported already.

    Only code of torch and torchvision may run inside: a user's network may need the compiler.
    """
    if _COMPILER in sys.modules:
        yield
        return
    import torch

    compiler: Any = ModuleType(_COMPILER)
    utils: Any = ModuleType(f"{_COMPILER}.utils")
    compiler.utils = utils
    compiler.disable = lambda function, *_, **__: function
    compiler.graph_break = lambda *_, **__: None
    utils.get_optimize_ddp_mode = lambda: "no_optimization"
    utils.is_compile_supported = _is_compile_supported
    replaced = {each.__name__: each for each in (compiler, utils)}
    sys.modules.update(replaced)
    torch._dynamo = compiler
    try:
        yield
    finally:
        del torch._dynamo
        for name in replaced:
            del sys.modules[name]
