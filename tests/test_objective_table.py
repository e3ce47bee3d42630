"""The table of objectives in docs/objectives.md, recomputed on a small batch."""

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT / "benchmarks"))

import objectives  # pyright: ignore[reportMissingImports]

from raycl.loss_specs import LOSSES
from tests.workers.objectives import CASES

PART = objectives.part_of((ROOT / "docs" / "objectives.md").read_text(), "errors")[1]
ROWS = objectives.read_errors(PART)
REMEDY = "run: python benchmarks/objectives.py --only errors --write docs/objectives.md"


def test_every_loss_and_every_case_has_a_row() -> None:
    assert {case.loss for case in CASES.values()} == set(LOSSES)
    assert list(ROWS) == list(CASES), REMEDY


@pytest.mark.parametrize("name", CASES)
def test_the_errors_and_refusals_of_a_row_hold(name: str) -> None:
    found = objectives.problems(name, ROWS.get(name, {}), objectives.SMALL)
    assert not found, "\n".join([*found, REMEDY])


def test_a_wrong_row_is_found() -> None:
    row = {**ROWS["siglip"], "queue": "1.0e-07", "ring": "2.0e-05"}
    found = objectives.problems("siglip", row, objectives.SMALL)
    assert len(found) == 2
    assert "siglip, queue: the page has '1.0e-07', and the command 'refused: loss siglip" in found[0]
    assert found[1] == "siglip, ring: an error of 2e-05 is above 1e-05"
