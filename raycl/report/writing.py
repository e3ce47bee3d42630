"""A report written: one page about a run, or one about several."""

from collections.abc import Sequence
from dataclasses import replace

from raycl.report.page import comparison_of, distinct_names, page_of
from raycl.report.run import read_run
from raycl.storage import Place

PAGE = "report.html"
COMPARISON = "comparison.html"


def write_report(run: str, output: str | None = None) -> Place:
    """Write the page of the run at ``run``, by default to ``report.html`` in it; return where it lies.

    Raises ``DataError`` if there is no run or nothing logged, ``StorageError`` if a file cannot be read or
    written.
    """
    place = Place(run) / PAGE if output is None else Place(output)
    place.write_text(_encodable(page_of(read_run(run))))
    return place


def write_comparison(runs: Sequence[str], output: str = COMPARISON) -> Place:
    """Write one page about several runs; return where it lies. Raises as ``write_report`` does."""
    found = [read_run(run, with_portrait=False) for run in runs]
    named = [replace(run, name=name) for run, name in zip(found, distinct_names(found), strict=True)]
    place = Place(output)
    place.write_text(_encodable(comparison_of(named)))
    return place


def _encodable(page: str) -> str:
    """Return the page without halves of characters, such as the name of a file that is no UTF-8 leaves in a text."""
    return page.encode("utf-8", "replace").decode("utf-8")
