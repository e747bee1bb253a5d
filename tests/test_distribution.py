"""The package as people install it: built from a clone, put into an empty environment beside torch, and used there."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from folders import make_run
from test_package import LIBRARY, NEEDS_TRITON, files_of

pytest.importorskip("build", reason="build is not installed")
pytest.importorskip("hatchling", reason="hatchling is not installed")

ROOT = Path(__file__).parent.parent
NOT_SOURCE = {"build", "data", "dist", "report", "runs", "studies", "site"}  # what people have lying about in a clone
COMPILED = {".so", ".pyd", ".dylib", ".dll"}
HAS_COMPILER = shutil.which(os.environ.get("CC", "cc").split()[0]) is not None


def without_clutter(folder, names):
    at_the_top = Path(folder) == ROOT
    hidden = {name for name in names if at_the_top and name.startswith(".") and name != ".gitignore"}
    compiled = {name for name in names if Path(name).suffix in COMPILED}
    return hidden | compiled | ({*names} & NOT_SOURCE if at_the_top else set()) | {"__pycache__"}


def build(clone, out, *options, **environment):
    """As ``python -m build``, which would fetch hatchling anew."""
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), *options, str(clone)]
    variables = {**os.environ, **environment}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def clone(tmp_path_factory):
    """A clone in which somebody has worked."""
    clone = tmp_path_factory.mktemp("clone") / "balnorm"
    shutil.copytree(ROOT, clone, ignore=without_clutter)
    for clutter in (".venv/lib/left.py", "studies/left.json", "src/balnorm/__pycache__/left.pyc", "data/left.bin"):
        (clone / clutter).parent.mkdir(parents=True)
        (clone / clutter).write_text("")
    return clone


@pytest.fixture(scope="module")
def built(clone, tmp_path_factory):
    """An sdist, and the wheel that is built from it."""
    out = tmp_path_factory.mktemp("dist")
    build(clone, out)
    (sdist,), (wheel,) = out.glob("*.tar.gz"), out.glob("*.whl")
    return sdist, wheel


def sources(*folders):
    return {
        path.relative_to(ROOT).as_posix()
        for folder in folders
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix not in COMPILED
    }


def test_the_sdist_has_all_of_the_source_and_nothing_else(built):
    with tarfile.open(built[0]) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert sources("src", "tests", "examples") <= names
    documents = {"README.md", "CHANGELOG.md", "CITATION.cff", "CONTRIBUTING.md", "LICENSE", "docs/method.md"}
    assert documents | {"pyproject.toml", "constraints.txt", "Makefile", "PKG-INFO"} <= names
    assert not [name for name in names if "left" in name or Path(name).suffix in COMPILED]


def test_the_wheel_has_the_package_and_nothing_else(built):
    """A wheel for one platform may have compiled code in it, and need not have that code's source."""
    with zipfile.ZipFile(built[1]) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    expected = {name.removeprefix("src/") for name in sources("src")}
    compiled = {name for name in names if Path(name).suffix in COMPILED}
    if HAS_COMPILER:
        assert compiled == {"balnorm/_core/backends/kernels.so"}
        assert built[1].name.endswith(f"-py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}.whl")
    assert names - compiled <= expected
    assert {Path(name).suffix for name in expected - names} <= {".c", ".h"}
    assert {"balnorm/py.typed", "balnorm/bench/study/page/report.html"} <= names


def test_without_a_compiler_the_wheel_is_one_for_every_platform(clone, tmp_path):
    """Even if kernels were compiled in this clone before: they may be of another version."""
    (clone / "src/balnorm/_core/backends/kernels.so").write_bytes(b"old")
    printed = build(clone, tmp_path, "--wheel", CC="/nowhere/cc")
    (wheel,) = tmp_path.glob("*-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as opened:
        assert not [name for name in opened.namelist() if Path(name).suffix in COMPILED]
    assert "without its native kernels, and slower on CPUs: there is no C compiler (/nowhere/cc)" in printed


def distributions(*names):
    """The distributions installed here under these names, and all that they need."""
    found, waiting = {}, [(name, "") for name in names]
    while waiting:
        name, extra = waiting.pop()
        if (name, extra) in found:
            continue
        distribution = found[name, extra] = metadata.distribution(name)
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                waiting += [(requirement.name, inner) for inner in ("", *requirement.extras)]
    return found.values()


class Environment:
    """An empty virtual environment, into which installed packages are linked and others are installed."""

    def __init__(self, folder):
        self.folder = folder
        venv.create(folder)
        self.bin = folder / ("Scripts" if os.name == "nt" else "bin")
        self.packages = Path(
            self.run("python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout[:-1]
        )

    def link(self, found):
        for distribution in found:
            tops = {file.parts[0] for file in distribution.files} - {"..", "__pycache__"}
            for top in tops:
                if not (self.packages / top).exists():
                    (self.packages / top).symlink_to(distribution.locate_file(top))

    def run(self, program, *arguments, **options):
        clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [self.bin / program, *arguments]
        return subprocess.run(command, env=clean, capture_output=True, text=True, check=False, **options)


def test_the_wheel_works_beside_torch_alone_and_the_extra_is_all_that_the_command_needs(built, tmp_path):
    environment = Environment(tmp_path / "environment")
    environment.link(distributions("torch"))
    install = [sys.executable, "-m", "pip", "--python", str(environment.folder), "install"]
    offline = ["--quiet", "--disable-pip-version-check", "--no-deps", "--no-index", str(built[1])]
    subprocess.run([*install, *offline], check=True)

    files = [path for module in LIBRARY for path in files_of(module) if path != NEEDS_TRITON]
    files = [path.relative_to(ROOT / "src").with_suffix("") for path in files]
    program = f"""if True:
        import {", ".join(".".join(file.parts).removesuffix(".__init__") for file in files)}
        import torch
        layer = balnorm.BalNormConv2d(3, 4, 3)
        layer(torch.rand(2, 3, 8, 8)).square().sum().backward()
        assert layer.weight.grad.abs().sum() > 0
        print(balnorm.__file__)
        print(balnorm.backend())
    """
    done = environment.run(
        "python", "-W", "error", "-W", "ignore:Failed to initialize NumPy", "-c", program, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    file, backend = done.stdout.splitlines()
    assert Path(file).is_relative_to(environment.packages)
    assert backend.startswith("native") or not HAS_COMPILER or os.environ.get("BALNORM_BACKEND") == "torch"

    done = environment.run("balnorm", "--help", cwd=tmp_path)
    assert done.stdout.startswith("usage: balnorm COMMAND")
    done = environment.run("balnorm", "data", "list", cwd=tmp_path)
    assert done.returncode == 1
    *_, message = done.stderr.splitlines(keepends=True)  # torch warns that NumPy is missing
    assert message == "balnorm: the command line needs tyro: pip install '.[bench]' in a clone of the repository\n"

    with zipfile.ZipFile(built[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        lines = wheel.read(name).decode().splitlines()
    extra = [line.split(":", 1)[1] for line in lines if line.startswith("Requires-Dist:") and "'bench'" in line]
    environment.link(distributions(*(Requirement(line).name for line in extra)))
    make_run(tmp_path / "study")
    done = environment.run("balnorm", "report", "study", "--out", "report", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "report" / "index.html").exists()
