"""The encoder of a run: the one it saved at its end, or the one in its last checkpoint."""

from collections.abc import Collection, Sequence

from torch import nn

from raycl.arguments import Address, as_address, check_type
from raycl.errors import ConfigError
from raycl.inference.checkpoint_encoder import read_checkpoint_encoders
from raycl.inference.preflight import has_checkpoint, has_encoder
from raycl.models.encoder_io import ImageEncoder, SavedEncoder, TextEncoder, read_encoder
from raycl.models.registry import SideName, check_side


def load_encoder(
    uri: Address,
    *,
    side: SideName = "query",
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> ImageEncoder | TextEncoder:
    """Load the encoder of the run at ``uri``, in evaluation mode.

    An unfinished run gives the encoder of its last checkpoint; stderr reports which. The folder of a checkpoint below
    ``checkpoints`` gives the encoder that it has. ``side`` selects one
    of two towers: ``query`` (or images), or ``key`` (documents or captions), which may share one encoder.
    Their projection heads are included. ``network`` is needed for an encoder that was passed to
    ``raycl.train`` as a module, which cannot be built from a name; the weights are loaded into a copy of it. A name such as
    ``package.module:function`` is code to import and call with arguments from the same file: its package
    must be in ``trusted``, which defaults to RAYCL_TRUSTED.

    Raises:
        StorageError: Encoder and checkpoint are missing, one is damaged, or the tokenizer does not match.
        ConfigError: The side is unknown, or the package is not trusted.
    """
    (saved,) = read_encoders(uri, [side], network=network, trusted=trusted)
    return saved.build(network, trusted=trusted)


def read_encoders(
    uri: Address,
    sides: Sequence[SideName],
    *,
    network: nn.Module | None = None,
    trusted: Collection[str] | None = None,
) -> list[SavedEncoder]:
    """Read the encoders of these sides, all from one checkpoint; arguments as in ``load_encoder``."""
    for side in sides:
        check_side(side)
    check_type("network", network, nn.Module, optional=True)
    if isinstance(trusted, str):
        raise ConfigError(f"trusted must be a list of packages, came {trusted!r}; give [{trusted!r}]")
    run = as_address("run", uri)
    if has_encoder(run) or not has_checkpoint(run):
        return [read_encoder(run, side=side) for side in sides]
    return read_checkpoint_encoders(run, sides, network=network, trusted=trusted)
