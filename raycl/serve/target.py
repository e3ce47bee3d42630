"""What is explored, as a value: a bank, the run that encodes for it, the set that its samples are of."""

import os
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from raycl.config import RunConfig
from raycl.config.overrides import config_from_yaml
from raycl.data.columns import ColumnNames
from raycl.data.sources import find_source
from raycl.errors import RayclError
from raycl.negatives.bank import Bank, connect_bank
from raycl.serve.explorer import Explorer
from raycl.serve.query_encoder import QueryEncoder
from raycl.serve.reconnecting_bank import ReconnectingBank
from raycl.serve.sample_viewer import SampleViewer
from raycl.serve.schemas import Queries
from raycl.storage import Place, absolute

_PATIENCE_S = 8.0  # a page waits for no shard as long as a worker does

# By the kind of a run's data: which columns a person looks at, and what the encoder takes.
_COLUMNS = {
    "image": ("image",),
    "text": ("text",),
    "image_text": ("image", "caption"),
    "pairs": ("query", "document"),
}
_QUERIES: dict[str, tuple[Queries, ...]] = {
    "image": ("image",),
    "text": ("text",),
    "image_text": ("image", "text"),
    "pairs": ("text",),
}
_NOTHING = dict.fromkeys(("image", "text", "caption", "query", "document"))


@final
@dataclass(frozen=True, kw_only=True)
class ServeTarget:
    """A bank by its name, and where its run and its samples are.

    ``queries`` are what the run's encoder takes, nothing if there is none to ask; ``trusted`` are the
    packages whose networks it may build, as RAYCL_TRUSTED has them.
    """

    bank: str
    run: str
    queries: tuple[Queries, ...]
    data: str | None
    columns: ColumnNames
    max_pixels: int
    token: str
    trusted: str

    def explorer(self) -> Explorer:
        """Return what answers questions, in any process of the cluster."""
        samples = SampleViewer(self.data, self.columns, max_pixels=self.max_pixels) if self.data else None
        return Explorer(
            bank=ReconnectingBank(partial(_impatient_bank, self.bank)),
            encoder=QueryEncoder(self.run),
            samples=samples,
            queries=self.queries,
        )


def look_at(bank: str, *, run: str | None, data: str | None, token: str) -> ServeTarget:
    """Look at the bank, the run (that of the bank, unless told) and the set, before anything starts.

    Raises what is wrong with them. Without ``run`` and ``data`` the run need not be there to be read.
    """
    plan = connect_bank(bank).plan
    place = Place(absolute(run or plan.output))
    columns, queries, max_pixels = ColumnNames(), (), 0
    config = _config_at(place, must_be=run is not None or data is not None)
    if config is not None:
        columns, queries, max_pixels = columns_of(config), _QUERIES[config.data.kind], config.data.max_pixels
    if data is not None:
        find_source(data, columns)
    return ServeTarget(
        bank=bank,
        run=place.uri,
        queries=queries,
        data=None if data is None else absolute(data),
        columns=columns,
        max_pixels=max_pixels,
        token=token,
        trusted=os.environ.get("RAYCL_TRUSTED", ""),
    )


def columns_of(config: RunConfig) -> ColumnNames:
    """Return the columns of what a person looks at, and those of labels and ids."""
    named = config.data.columns
    shown = {role: getattr(named, role) for role in _COLUMNS[config.data.kind]}
    return ColumnNames(**_NOTHING | shown, label=named.label, sample_id=named.sample_id)


def _config_at(place: Place, *, must_be: bool) -> RunConfig | None:
    file = place / "config.yaml"
    try:
        return config_from_yaml(file.read_text(), name=file.uri)
    except RayclError:
        if must_be:
            raise
        return None


def _impatient_bank(name: str) -> Bank:
    bank = connect_bank(name)
    return Bank(replace(bank.plan, timeout_s=min(bank.plan.timeout_s, _PATIENCE_S)), bank.actors)
