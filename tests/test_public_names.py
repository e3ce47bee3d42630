"""The public names: sorted, complete and documented."""

import importlib
import importlib.metadata
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import raycl


def test_public_names_are_sorted() -> None:
    assert raycl.__all__ == sorted(raycl.__all__)


@pytest.mark.parametrize("name", raycl.__all__)
def test_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(raycl, name).__doc__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = raycl.trian


def test_importing_raycl_loads_neither_torch_nor_ray() -> None:
    code = "import raycl, sys; sys.exit(bool({'torch', 'ray'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_version_is_the_installed_one_and_loads_neither_torch_nor_ray() -> None:
    code = "import raycl, sys; print(raycl.__version__, {'torch', 'ray'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert done.stdout == f"{importlib.metadata.version('raycl')} set()\n"


def test_files_that_are_not_installed_have_an_unknown_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", fail)
    assert raycl.__version__ == "unknown"


def test_type_checkers_find_the_annotations() -> None:
    assert (Path(raycl.__file__).parent / "py.typed").exists()


@pytest.mark.parametrize("room", ["raycl.training", "raycl.inference", "raycl.report", "raycl.doctor"])
def test_public_names_stay_functions_after_rooms_are_imported(room: str) -> None:
    importlib.import_module(room)
    verbs = (raycl.train, raycl.evaluate, raycl.embed, raycl.mine, raycl.write_report, raycl.run_doctor)
    assert all(inspect.isfunction(verb) for verb in verbs)
