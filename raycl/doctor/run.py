"""The examination: cluster, storage, data and recipe, one finding after the other."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from raycl.cluster import connect_cluster
from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.doctor.auth import examine_access
from raycl.doctor.cluster import examine_gpus, examine_object_store, examine_size, examine_versions
from raycl.doctor.data import DataExam
from raycl.doctor.machine import look_around
from raycl.doctor.memory import RoomExam
from raycl.doctor.network import examine_network
from raycl.doctor.nodes import alive_nodes, ask, why
from raycl.doctor.result import CheckResult
from raycl.doctor.shared_storage import examine_storage
from raycl.errors import RayclError
from raycl.progress import ProgressLine

_SILENT_S = 3.0  # what takes less is not worth a line


@final
@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What to look at besides the cluster: a set, the output of a run, a recipe.

    ``columns`` are those of a set that is looked at without a recipe; ``recipe`` has its own.
    """

    data: str | None = None
    columns: ColumnNames | None = None
    output: str | None = None
    recipe: RunConfig | None = None
    address: str | None = None
    debug: bool = False


def examine(
    *,
    data: str | None = None,
    columns: ColumnNames | None = None,
    output: str | None = None,
    recipe: RunConfig | None = None,
    address: str | None = None,
    quiet: bool = True,
    debug: bool = False,
) -> list[CheckResult]:
    """Look at the cluster, and at data, output and recipe where they are given.

    Never raises raycl's own errors: they are findings.
    """
    request = DoctorRequest(
        data=data, columns=columns, output=output, recipe=recipe, address=address, debug=debug
    )
    return list(examinations(request, quiet=quiet))


def examinations(request: DoctorRequest, *, quiet: bool = False) -> Iterator[CheckResult]:
    """Yield the findings as they come; unless ``quiet``, say on stderr what takes long."""
    watch = _Watch(sum(map(bool, (request.data, request.output, request.recipe))) + 4)
    with ProgressLine("doctor", watch.look, quiet=quiet):
        try:
            yield from _examinations(request, watch)
        except RayclError as error:
            yield CheckResult(good=False, name=watch.subject, seen=str(error))
        # A cluster that falls apart meanwhile is a finding too.
        except Exception as error:
            if request.debug:
                raise
            yield CheckResult(
                good=False,
                name=watch.subject,
                seen=why(error),
                remedy="try again; --debug tells the whole story",
            )


@final
class _Watch:
    """What is looked at now, for the progress line."""

    def __init__(self, total: int) -> None:
        self.subject, self._done, self._total = "cluster", -1, total
        self._began = time.monotonic()

    def begin(self, subject: str) -> None:
        """Say what comes next."""
        self.subject, self._done = subject, self._done + 1

    def look(self) -> tuple[int, int, str] | None:
        """Return what a progress line shows."""
        if time.monotonic() - self._began < _SILENT_S:
            return None
        return self._done, self._total, f"looking at {self.subject}"


def _examinations(request: DoctorRequest, watch: _Watch) -> Iterator[CheckResult]:
    watch.begin("cluster")
    connect_cluster(request.address, debug=request.debug)
    nodes = alive_nodes()
    machines = ask(nodes, look_around)
    yield examine_versions(machines)
    answering = [answer.node for answer in machines if answer.came]
    yield examine_size(nodes)
    yield examine_object_store(nodes)
    watch.begin("GPUs")
    yield from examine_gpus(answering)
    watch.begin("access")
    yield examine_access(answering)
    if request.output is not None:
        watch.begin("storage")
        yield examine_storage(request.output, answering)
    seen = None
    if request.data is not None:
        watch.begin("data")
        data = DataExam(request.data, request.columns, request.recipe)
        yield from data.findings()
        seen = data.seen
    gradient_bytes = 0.0
    if request.recipe is not None:
        watch.begin("memory")
        room = RoomExam(request.recipe, seen, machines)
        yield from room.findings()
        gradient_bytes = room.gradient_bytes
    watch.begin("network")
    yield examine_network(answering, gradient_bytes)
