"""Pack the dependencies of a machine without network into folders that can be carried there one by one.

    python benchmarks/pack_gpu.py --output packed [--have installed.txt] [--python 3.12] [--mib 50]

The wheels of raycl's dependencies, of lightly and of the tests, for Linux on x86-64, without torch and its CUDA
libraries, which a machine with a GPU has. ``--have`` is a list of further packages installed there, one name a
line, such as ``pip freeze`` writes. Ray's wheel comes without its Java libraries and its dashboard's pages.
Needs uv and a package registry. ``packed/1``, ``packed/2``, ... have at most ``--mib`` each. There:

    python -m pip install --no-index --no-deps --target site packed/*/*.whl
    PYTHONPATH=$PWD:$PWD/site python benchmarks/gpu.py --data cifar10 --output gpu
"""

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from measuring import FOLDER, make_parser

MEASURED = ("inf-cl", "lightly>=1.5.20", "pytest>=8.4", "pytest-timeout>=2.3", "hypothesis>=6.120")
OF_TORCH = re.compile(r"torch|torchvision|triton|nvidia-.*|cuda-.*")
GLIBC = range(39, 16, -1)  # pip takes the very number that a wheel names
LEFT_OUT = re.compile(r"ray/jars/|ray/dashboard/client/build/|ray/core/src/.*\.jar$")


def main() -> None:
    flags = {"output": "packed", "python": "3.12", "mib": 50.0}
    options = make_parser(__doc__, reports=False, have=None, **flags).parse_args()
    have = installed(options.have and Path(options.have))
    with tempfile.TemporaryDirectory() as folder:
        wheels = Path(folder)
        needed = [line for line in resolve(options.python) if not is_there(line, have)]
        download(needed, wheels, options.python)
        for wheel in wheels.glob("ray-*.whl"):
            slim(wheel)
        fill(
            sorted(wheels.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size),
            Path(options.output),
            options.mib,
        )


def installed(path: Path | None) -> set[str]:
    lines = path.read_text().splitlines() if path else []
    return {normal(re.split(r"[ =<>@\[;]", line.strip())[0]) for line in lines if line.strip()}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def is_there(requirement: str, have: set[str]) -> bool:
    name = normal(requirement.split("==")[0])
    return name in have or OF_TORCH.fullmatch(name) is not None


def resolve(python: str) -> list[str]:
    """Return name==version of all that raycl and its measurements need."""
    command = ["uv", "pip", "compile", str(FOLDER.parent / "pyproject.toml"), "-"]
    command += ["--no-header", "--no-annotate", "--quiet"]
    command += ["--python-version", python, "--python-platform", "x86_64-manylinux_2_28"]
    done = subprocess.run(command, input="\n".join(MEASURED), text=True, check=True, stdout=subprocess.PIPE)
    return [line.split(";")[0].strip() for line in done.stdout.splitlines() if "==" in line]


def download(needed: list[str], folder: Path, python: str) -> None:
    """Fetch the wheels; build those that are published as sources only, if they are not bound to a platform."""
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in GLIBC]
    platforms += [f"--platform=manylinux{year}_x86_64" for year in (2014, 2010, 1)]
    pip = ["uv", "tool", "run", "--quiet", "pip"]
    fetch = [*pip, "download", "--quiet", "--no-deps", f"--dest={folder}", "--only-binary=:all:"]
    fetch += ["--implementation=cp", f"--python-version={python}", *platforms]
    for requirement in needed:
        if subprocess.run([*fetch, requirement], check=False, stderr=subprocess.DEVNULL).returncode:
            build = [*pip, "wheel", "--quiet", "--no-deps", f"--wheel-dir={folder}", requirement]
            subprocess.run(build, check=True)
            name = normal(requirement.split("==")[0])
            wheel = next(wheel for wheel in folder.glob("*.whl") if normal(wheel.name.split("-")[0]) == name)
            if not wheel.name.endswith("-none-any.whl"):
                sys.exit(f"{requirement} has no wheel for Python {python} on Linux; install it there")


def slim(wheel: Path) -> None:
    """Rewrite a wheel without the excluded files."""
    slimmer = wheel.with_suffix(".slim")
    with (
        zipfile.ZipFile(wheel) as given,
        zipfile.ZipFile(slimmer, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as kept,
    ):
        for entry in given.infolist():
            content = given.read(entry)
            if LEFT_OUT.match(entry.filename):
                continue
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not LEFT_OUT.match(line)).encode()
            kept.writestr(entry, content)
    slimmer.replace(wheel)


def fill(wheels: list[Path], output: Path, mib: float) -> None:
    """Put each wheel, the largest first, into the first folder that has room for it."""
    sizes: list[float] = []
    for wheel in wheels:
        size = wheel.stat().st_size / 2**20
        if size > mib:
            sys.exit(f"{wheel.name} has {size:.1f} MiB, more than --mib {mib:g}; nothing else was written")
    shutil.rmtree(output, ignore_errors=True)
    for wheel in wheels:
        size = wheel.stat().st_size / 2**20
        part = next((index for index, filled in enumerate(sizes) if filled + size <= mib), len(sizes))
        sizes[part:] = [size] if part == len(sizes) else [sizes[part] + size, *sizes[part + 1 :]]
        folder = output / str(part + 1)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.move(wheel, folder / wheel.name)
        print(f"{size:6.1f} MiB  {folder.name}  {wheel.name}")
    for part, size in enumerate(sizes, 1):
        print(f"{output / str(part)}: {size:.1f} MiB")


if __name__ == "__main__":
    main()
