"""The layers of the code: each package imports only lower layers."""

import ast
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

PACKAGE = Path(__file__).parent.parent / "raycl"
LAYERS = (  # lowest first; packages in the same layer do not import each other
    {"errors", "display", "eager_torch", "loss_specs", "splitmix"},
    {"arguments", "gpus"},
    {"ray_runtime", "storage", "distributed.shared_memory", "tokenization", "tracking.prometheus"},
    {"chain"},
    {"records", "provenance", "embedding_snapshot"},
    {"distributed", "lease"},
    {"losses", "augment", "data"},
    {"batchnorm"},
    {"models", "optim", "negatives", "gradient_cache"},
    {"evaluation"},
    {"config"},
    {"config.overrides", "tracking", "models.build"},
    {"recipes"},
    {"progress", "cli.options", "training.coordinator"},
    {"training", "inference"},
    {"preparation", "report", "tuning"},
    {"evaluation.classification", "evaluation.retrieval", "evaluation.sts", "step_replay"},
    {"cli.plan", "doctor", "demo", "serve"},
    {"api", "cli.serve"},
    {"cli.bank"},
    {"cli"},
    {"__main__"},
)
LAYER_OF = {package: number for number, packages in enumerate(LAYERS) for package in packages}
LOWEST = {
    "errors",
    "gpus",
    "display",
    "splitmix",
    "storage",
    "records",
    "tokenization",
    "config",
    "config.overrides",
    "recipes",
    "provenance",
    "lease",
    "embedding_snapshot",
    "report",
}
MATHEMATICS = {
    "losses",
    "augment",
    "distributed",
    "models",
    "batchnorm",
    "optim",
    "evaluation",
    "gradient_cache",
}
FILES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def package_of(path: Path) -> str:
    return package_of_module([*path.relative_to(PACKAGE).with_suffix("").parts])


def package_of_module(names: list[str]) -> str:
    """Return the package of a module; some files count as separate packages."""
    own = ".".join(names[:2])
    return own if own in LAYER_OF else names[0]


def modules_imported_by(path: Path) -> set[str]:
    modules = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} imports relatively"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def packages_imported_by(path: Path) -> set[str]:
    parts = [module.split(".") for module in modules_imported_by(path)]
    return {package_of_module(names[1:]) for names in parts if names[0] == "raycl" and len(names) > 1}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_each_module_imports_only_lower_layers(path: Path) -> None:
    package = package_of(path)
    for imported in packages_imported_by(path) - {package}:
        assert LAYER_OF[imported] < LAYER_OF[package], f"{package} imports {imported}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_file_imports_more_than_twenty_modules_of_the_package(path: Path) -> None:
    modules = {
        node.module
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("raycl")
    }
    assert len(modules) <= 20


def test_every_package_has_a_layer() -> None:
    assert {package_of(path) for path in FILES} == set(LAYER_OF)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_the_lowest_layer_imports_no_torch_or_ray_and_mathematics_imports_no_ray(path: Path) -> None:
    libraries = {module.split(".")[0] for module in modules_imported_by(path)}
    if package_of(path) in LOWEST:
        assert not libraries & {"torch", "torchvision", "ray"}
    if package_of(path) in MATHEMATICS:
        assert "ray" not in libraries


def test_data_tasks_import_torch_only_to_resize_photographs() -> None:
    names = "codecs, decode, images, in_memory, read_stats, sources, split, texts"
    task = f"""
        import sys
        import numpy
        from raycl.data import {names}
        for size in (32, 300):
            images.ImageFormat(size=16).decode(numpy.zeros((size, size, 3), numpy.uint8))
            assert "torch" not in sys.modules
        images.ImageFormat(size=224).decode(numpy.zeros((300, 400, 3), numpy.uint8))
        assert "torch" in sys.modules
    """
    subprocess.run([sys.executable, "-c", dedent(task)], check=True)


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        (["raycl.training.controller"], {"torch"}),
        (["raycl.training.coordinator"], {"pyarrow", "pydantic"}),
        (
            [
                "raycl.training.loop",  # first: each worker imports it
                "raycl.training.launch",
                "raycl.inference.embed",
                "raycl.evaluation.classification",
            ],
            {"torch._dynamo", "scipy", "sklearn"},
        ),
    ],
    ids=["controller", "coordinator", "processes with torch"],
)
def test_a_process_starts_without_what_it_may_not_need(modules: list[str], absent: set[str]) -> None:
    code = "import sys\n" + "".join(
        f"import {module}; print({module!r}, *{absent} & sys.modules.keys())\n" for module in modules
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True).splitlines() == modules
