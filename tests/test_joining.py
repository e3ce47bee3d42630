"""Which Ray a question is put to: the only one here, or the one that is named."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from raycl.errors import ConfigError, RunError
from raycl.joining import enter, join_running, start_early, the_only


@pytest.fixture(autouse=True)
def not_joined(monkeypatch: pytest.MonkeyPatch) -> None:
    """Act as a process that has joined no Ray, though other tests of the session have."""
    monkeypatch.setattr("raycl.joining.ray.is_initialized", lambda: False)


def test_the_only_ray_of_a_machine_is_asked() -> None:
    assert the_only({"10.0.0.1:6379"}) == "10.0.0.1:6379"


@pytest.mark.parametrize(
    ("addresses", "says"),
    [
        (set(), "no Ray runs on this machine.*--address"),
        ({"10.0.0.1:2", "10.0.0.1:1"}, "2 Rays run.*10.0.0.1:1, 10.0.0.1:2.*--address"),
    ],
)
def test_none_and_several_are_one_line(addresses: set[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        the_only(addresses)


@pytest.mark.parametrize("address", ["nonsense", "ray://127.0.0.1:10001", "127.0.0.1:many"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    with pytest.raises(ConfigError, match="HOST:PORT"):
        join_running(address)


@pytest.mark.parametrize("join", [join_running, enter])
@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.0.0.1:99999", "localhost:1"])
def test_a_ray_that_is_gone_is_told_at_once(address: str, join: Callable[[str], object]) -> None:
    with pytest.raises(RunError, match="nothing answers"):
        join(address)


@pytest.mark.parametrize("module", ["raycl.banks", "raycl.bank_tables", "raycl.cli"])
def test_a_question_does_not_pay_for_torch_and_ray_train(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'ray.data', 'ray.train', 'pandas'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("module", ["raycl.setup", "raycl.training.admission"])
def test_a_run_that_is_refused_does_not_pay_for_torch_and_ray(module: str) -> None:
    code = f"import {module}, sys; sys.exit(bool({{'torch', 'ray', 'pandas'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("address", "variable", "expected"),
    [
        (None, None, ["torchvision", "local"]),
        ("local", "10.0.0.1:6379", ["torchvision", "local"]),
        ("10.0.0.1:6379", None, []),
        (None, "10.0.0.1:6379", []),
    ],
)
def test_only_a_ray_of_its_own_is_started_while_torch_is_imported(
    monkeypatch: pytest.MonkeyPatch, address: str | None, variable: str | None, expected: list[str]
) -> None:
    begun: list[str] = []
    monkeypatch.setattr("raycl.joining.import_module", begun.append)
    monkeypatch.setattr("raycl.joining.enter", lambda where, *, debug: begun.append(where))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable is not None:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    start_early(address)
    assert sorted(begun, reverse=True) == expected
