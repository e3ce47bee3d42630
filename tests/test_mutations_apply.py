"""Every mutation in ``tests/mutations.py`` still applies to the code."""

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation, mutated


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.title)
def test_a_mutation_applies_to_exactly_one_place(mutation: Mutation) -> None:
    assert mutated((ROOT / mutation.path).read_text(), mutation) != (ROOT / mutation.path).read_text()
    assert all((ROOT / path).exists() for path in mutation.tests.split())
