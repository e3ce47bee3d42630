"""The checks of commands about a trained run that need neither torch nor Ray."""

from collections.abc import Iterable

from raycl.data.sources import existing
from raycl.errors import ConfigError, StorageError
from raycl.gpus import are_missing, check_gpu
from raycl.lease import check_absent
from raycl.models.registry import SPEC, SideName, check_side
from raycl.storage import Place, absolute
from raycl.training.resume import CHECKPOINTS, LISTED


def check_package(to: str | None) -> None:
    """Raise ``ConfigError`` for a package that encoders are not exported to."""
    if to not in ("sentence_transformers", "torchvision", None):
        raise ConfigError(f"cannot export to {to!r}; there are sentence_transformers and torchvision")


def check_mining(num_negatives: int, max_relative_score: float) -> None:
    """Raise ``ConfigError`` for a number or a fraction by which no negatives are mined."""
    if num_negatives < 1 or not 0 < max_relative_score <= 1:
        raise ConfigError(
            f"cannot mine {num_negatives} negatives below {max_relative_score:g} of the positive; give 1 or more, and a "
            "fraction up to 1"
        )


def admit(
    run: str,
    *,
    side: SideName = "query",
    data: Iterable[str | None] = (),
    output: str | None = None,
    gpu: bool = False,
    address: str | None = None,
) -> None:
    """Look for the encoder of ``run``, for the sets in ``data`` and for an earlier ``output``.

    Raises:
        ConfigError: There is no such side, or no GPU on the machine where Ray would be started.
        StorageError: ``run`` has neither an encoder nor a checkpoint, or ``output`` exists.
        DataError: A set does not exist.
    """
    check_side(side)
    if gpu and are_missing(address):
        check_gpu(0)
    place = Place(absolute(run))
    if not ((place / SPEC).exists() or (place / CHECKPOINTS / LISTED).exists()):
        raise StorageError(
            f"there is no encoder at {run} (no {SPEC}, no checkpoint); give the --output of a run"
        )
    for uri in filter(None, data):
        existing(uri)
    if output is not None:
        check_absent(output)
