"""All checks in order: the cluster, and storage, data and recipe where they are given."""

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import final

from raycl.config import RunConfig
from raycl.data.columns import ColumnNames
from raycl.doctor.checks import (
    check_access,
    check_gpus,
    check_network,
    check_object_store,
    check_size,
    check_versions,
)
from raycl.doctor.data import check_data
from raycl.doctor.memory import check_memory
from raycl.doctor.nodes import alive_nodes, ask_nodes, describe_node
from raycl.doctor.result import CheckResult, failed
from raycl.doctor.storage import check_storage
from raycl.errors import RayclError, last_line
from raycl.progress import ProgressLine
from raycl.ray_runtime import connect_cluster

_QUIET_S = 3.0  # before the progress line appears


@final
@dataclass(frozen=True, kw_only=True)
class DoctorRequest:
    """What to check besides the cluster: data, the output of a run, a recipe.

    ``columns`` names the columns of data without a recipe; a recipe has its own.
    """

    data: str | None = None
    columns: ColumnNames | None = None
    output: str | None = None
    recipe: RunConfig | None = None
    address: str | None = None
    debug: bool = False


def examinations(request: DoctorRequest, *, quiet: bool = False) -> Iterator[CheckResult]:
    """Yield the results as they come; unless ``quiet``, show a progress line on stderr if it takes long.

    Never raises raycl's own errors: they are results.
    """
    progress = _Progress(sum(map(bool, (request.data, request.output, request.recipe))) + 4)
    with ProgressLine("doctor", progress.state, quiet=quiet):
        try:
            yield from _checks(request, progress)
        except RayclError as error:
            yield failed(progress.subject, str(error))
        # A cluster that breaks down during the checks is a result, too.
        except Exception as error:
            if request.debug:
                raise
            yield failed(progress.subject, last_line(error), "try again; --debug shows the traceback")


@final
class _Progress:
    """The subject of the current check, for the progress line."""

    def __init__(self, total: int) -> None:
        self.subject, self._done, self._total = "cluster", -1, total
        self._started = time.monotonic()

    def begin(self, subject: str) -> None:
        self.subject, self._done = subject, self._done + 1

    def state(self) -> tuple[int, int, str] | None:
        if time.monotonic() - self._started < _QUIET_S:
            return None
        return self._done, self._total, f"checking {self.subject}"


def _checks(request: DoctorRequest, progress: _Progress) -> Iterator[CheckResult]:
    progress.begin("cluster")
    connect_cluster(request.address, debug=request.debug)
    nodes = alive_nodes()
    answers = ask_nodes(nodes, describe_node)
    yield check_versions(answers)
    answering = [answer.node for answer in answers if not answer.problem]
    yield check_size(nodes)
    yield check_object_store(nodes)
    progress.begin("GPUs")
    yield from check_gpus(answering)
    progress.begin("access")
    yield check_access(answering)
    if request.output is not None:
        progress.begin("storage")
        yield check_storage(request.output, answering)
    data = None
    if request.data is not None:
        progress.begin("data")
        data = yield from check_data(request.data, request.columns, request.recipe)
    gradient_bytes = 0.0
    if request.recipe is not None:
        progress.begin("memory")
        gradient_bytes = yield from check_memory(request.recipe, data, answers)
    progress.begin("network")
    yield check_network(answering, gradient_bytes)
