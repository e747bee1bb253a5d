"""The package as a whole: what imports what, and whether the documents tell the truth."""

import ast
import importlib.util
import json
import os
import re
import runpy
import subprocess
import sys
import types
import warnings
import xml.etree.ElementTree as ET
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

import balnorm
import balnorm_command
import notebook

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "balnorm"

# From the bottom up: a module, or a folder of them, imports only from those before it.
LIBRARY = [
    "_core",
    "functional",
    "init",
    "_checks",
    "activations",
    "channels",
    "layers",
    "text_table",
    "surgery",
    "diagnostics",
]
BENCH = ["bench", "__main__"]  # uses the library, and never the other way round
SHARED = {"bench/norms.py": {"balnorm._core.method", "balnorm._core.torch_private"}}  # what BalNorm computes too
ROOMS = {  # the order inside a folder, where it is kept
    "_core": ["torch_private", "options", "geometry", "method", "matrix", "lean", "backends", "function", "__init__"],
    "_core/backends": ["torch", "cpu", "triton_kernels", "triton", "triton_operators", "__init__"],
    "surgery": [
        "_model",
        "_flow",
        "_decisions",
        "_lean",
        "_statistics",
        "_exact",
        "_convert",
        "_fold",
        "_param_groups",
        "__init__",
    ],
    "bench": [
        "__init__",
        "norms",
        "models",
        "errors",
        "files",
        "console",
        "user_code",
        "data",
        "training",
        "recipes",
        "profiling",
        "device_check",
        "export",
        "study",
        "cli",
    ],
}
OTHERS = {  # what a module may import besides the standard library and this package; modules of the library: torch
    "diagnostics": {"matplotlib", "torch"},  # matplotlib only inside the function that draws
    "bench/norms": {"torch"},
    "bench/models": {"torch"},
    "bench/files": {"filelock"},
    "bench/user_code": {"torch"},
    "bench/data": {"numpy", "scipy", "sklearn", "PIL", "rich", "torch"},
    "bench/training": {"filelock", "torch", "rich"},
    "bench/profiling": {"torch"},
    "bench/device_check": {"torch"},
    "bench/export": {"torch"},
    "bench/study": {"jinja2", "matplotlib", "numpy", "ray", "rich", "torch"},
    "bench/cli": {"balnorm_command", "torch", "tyro"},
    "__main__": {"balnorm_command"},
}


def imported(path):
    """The modules that a file imports, with those only for type checking left out."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            node.body = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            folder = PACKAGE.parent / node.module.replace(".", "/")
            names = [alias.name for alias in node.names]
            if folder.is_dir():  # as in from balnorm._core.backends import cpu
                yield from (f"{node.module}.{name}" for name in names)
            if not all((folder / name).is_dir() or (folder / f"{name}.py").exists() for name in names):
                yield node.module


NEEDS_TRITON = PACKAGE / "_core" / "backends" / "triton_kernels.py"
"""The only file that imports Triton; it is imported itself when a layer on a GPU runs."""


def files_of(module):
    folder = PACKAGE / module
    return list(folder.rglob("*.py")) if folder.is_dir() else [PACKAGE / f"{module}.py"]


def test_every_module_has_its_place():
    files = {path.stem for path in PACKAGE.glob("*.py")}
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert files | folders == {"__init__", *LIBRARY, *BENCH}


def test_make_test_torch_leaves_out_what_the_library_can_do_without():
    """Its environment has no tyro: a module of the bench that is missing from the list ends it at once."""
    listed = re.search(r"^BENCH_SOURCES := (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split()
    assert {name.removesuffix(".py") for name in listed} == {*BENCH}


@pytest.mark.parametrize("module", [*LIBRARY, *BENCH])
def test_imports_point_downwards(module):
    order = [*LIBRARY, *BENCH]
    below = order[: order.index(module)]
    for path in files_of(module):
        for name in imported(path):
            top, *rest = name.split(".")
            if top == "balnorm":
                assert rest, f"{module} imports the package itself"
                assert rest[0] in [*below, *([module] if path.parent != PACKAGE else [])], f"{path} imports {name}"
                internal = rest[0].startswith("_") or (rest[0] != module and any(part[0] == "_" for part in rest))
                internal = internal and name not in SHARED.get(path.relative_to(PACKAGE).as_posix(), ())
                assert module in LIBRARY or not internal, f"{path} imports {name}, which is internal to the library"


@pytest.mark.parametrize("module", [*LIBRARY, *(f"bench/{name}" for name in ROOMS["bench"]), "__main__"])
def test_other_packages_are_imported_only_where_they_may_be(module):
    allowed = OTHERS.get(module, {"torch"} if module in LIBRARY else set())
    for path in files_of(module):
        found = {name.split(".")[0] for name in imported(path)} - {"balnorm", *sys.stdlib_module_names}
        assert found <= (allowed | {"triton"} if path == NEEDS_TRITON else allowed), path


@pytest.mark.parametrize("room", ROOMS)
def test_imports_inside_a_room_point_downwards(room):
    order, folder, prefix = ROOMS[room], PACKAGE / room, f"balnorm.{room.replace('/', '.')}."
    inside = [path for path in folder.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()]
    assert sorted(path.stem for path in inside) == sorted(order)
    for path in files_of(room):
        place = path.relative_to(folder).parts[0]
        below = order[: order.index(place.removesuffix(".py"))]
        for name in imported(path):
            if name.startswith(prefix):
                first, *rest = name.removeprefix(prefix).split(".")
                assert first in [*below, place], f"{path} imports {name}"  # a folder of the room may import from itself
                internal = first != place and any(part.startswith("_") for part in rest)
                assert not internal, f"{path} imports {name}, which is internal to {first}"


def test_importing_the_library_imports_nothing_but_torch():
    files = [path.relative_to(PACKAGE.parent).with_suffix("") for module in LIBRARY for path in files_of(module)]
    modules = {".".join(file.parts).removesuffix(".__init__") for file in files}
    modules -= {f"balnorm._core.backends.triton_{part}" for part in ("kernels", "operators")}
    program = f"import sys, torch; before = set(sys.modules); import {', '.join(modules)}; "
    program += "print(*set(sys.modules) - before)"
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert modules <= {*output.split()}
    assert not [name for name in output.split() if name.startswith("balnorm.bench")]
    assert {name.split(".")[0] for name in output.split()} <= {"balnorm", *sys.stdlib_module_names}


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--help"], (0, balnorm_command.USAGE, "")),
        (["--version"], (0, f"balnorm {version('balnorm')}\n", "")),
        ([], (2, "", balnorm_command.USAGE)),
    ],
)
def test_the_general_help_needs_no_torch(words, expected):
    program = "import sys; sys.modules['torch'] = None; import balnorm_command; sys.exit(balnorm_command.main())"
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == expected


def test_every_public_name_is_there_and_documented():
    for name in set(balnorm.__all__) - {"__version__"}:
        assert getattr(balnorm, name).__doc__


def test_the_package_is_typed():
    assert (PACKAGE / "py.typed").exists()


RUNNING = [
    "README.md",
    *(f"docs/{name}.md" for name in ("convert", "frameworks", "norms", "not-learning", "saving", "segmentation")),
    *(f"docs/{name}.md" for name in ("several-processes", "train", "volumes")),
]

OF_OTHERS = ("accelerate", "lightning", "monai", "segmentation_models_pytorch", "timm")


@pytest.mark.parametrize("document", RUNNING)
def test_python_in_the_documents_runs(document, tmp_path, monkeypatch):
    """Block after block, in one program, up to the first that wants a package that is not installed."""
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)
    assert blocks
    program = {}
    for block in blocks:
        for package in OF_OTHERS:
            if re.search(rf"^(?:import|from) .*\b{package}\b", block, re.MULTILINE):
                import_package_of_others(package)
        exec(compile(block, document, "exec"), program)


def import_package_of_others(package):
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    from benchmarks.zoo import import_timm

    import_timm()  # torchvision, which some of them import, has to be mended first
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(package)
    warnings.filterwarnings("ignore", module=package)


def run_example(name, folder):
    """What an example prints that wants packages of others: torchvision, which some import, has to be mended first."""
    program = """if True:
        import runpy, sys
        from benchmarks.zoo import import_timm
        import_timm()
        runpy.run_path(sys.argv[1], run_name="__main__")
    """
    command = [sys.executable, "-W", "ignore", "-c", program, str(ROOT / "examples" / name)]
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'src'}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def needs(package):
    return pytest.mark.skipif(importlib.util.find_spec(package) is None, reason=f"{package} is not installed")


@pytest.mark.slow
@needs("timm")
def test_the_conversion_example_runs(tmp_path):
    assert len((ROOT / "examples" / "convert_timm.py").read_text().splitlines()) < 40
    accuracy = re.search(r"test accuracy ([\d.]+)%", run_example("convert_timm.py", tmp_path))
    assert float(accuracy[1]) > 80
    assert (tmp_path / "digits.onnx").exists()


@pytest.mark.parametrize(
    "package",
    [
        pytest.param("timm", marks=[pytest.mark.slow, needs("timm")]),
        pytest.param("accelerate", marks=needs("accelerate")),
        pytest.param("lightning", marks=needs("lightning")),
    ],
)
def test_the_examples_of_averaged_weights_run(tmp_path, package):
    *_, accuracy = re.findall(r"([\d.]+)%", run_example(f"{package}_averages.py", tmp_path))
    assert float(accuracy) > 80


def test_the_callback_of_the_lightning_example(monkeypatch):
    """With the few things of Lightning that it uses, because Lightning is none of the packages of the tests."""
    for name in ("lightning", "lightning.pytorch", "lightning.pytorch.callbacks"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["lightning"].LightningModule = torch.nn.Module
    sys.modules["lightning.pytorch.callbacks"].Callback = object
    sys.modules["lightning.pytorch.callbacks"].EMAWeightAveraging = None
    callback = runpy.run_path(str(ROOT / "examples" / "lightning_averages.py"))["RenewStatistics"](batches=2)

    batches = [(torch.full((4, 1, 2, 2), value), None) for value in (1.0, 5.0, 100.0)]
    model = torch.nn.Sequential(balnorm.BalNormConv2d(1, 3, 1))
    trainer = types.SimpleNamespace(
        state=types.SimpleNamespace(fn="fit"),
        sanity_checking=True,
        train_dataloader=batches,
        strategy=types.SimpleNamespace(batch_to_device=lambda batch: batch),
        precision_plugin=types.SimpleNamespace(convert_input=lambda batch: batch, forward_context=nullcontext),
    )
    callback.on_validation_epoch_start(trainer, model)
    assert model[0].num_batches_tracked == 0
    trainer.sanity_checking = False
    callback.on_validation_epoch_start(trainer, model)
    assert model[0].running_mass.item() == 3
    trainer.train_dataloader = [(7 * torch.ones(1, 1, 2, 2), None)]
    trainer.state.fn = "validate"
    callback.on_validation_epoch_start(trainer, model)
    assert model[0].running_mass.item() == 3
    callback.on_train_end(trainer, model)
    assert model[0].running_mass.item() == 7


def test_the_notebook_runs(tmp_path):
    """And what is stored in it was made from its code of today, if on another day."""
    stored = json.loads((ROOT / "examples" / "tour.ipynb").read_text())
    assert stored["metadata"]["code_of_outputs"] == notebook.fingerprint(stored), (
        "the code has changed: run python tests/notebook.py examples/tour.ipynb"
    )
    assert all(cell["outputs"] for cell in notebook.code_cells(stored) if "print(" in "".join(cell["source"]))
    copy = tmp_path / "tour.ipynb"
    copy.write_text(json.dumps(stored))
    command = [sys.executable, "-W", "error", str(ROOT / "tests" / "notebook.py"), str(copy)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    made = json.loads(copy.read_text())
    kinds = [
        [[output["output_type"] for output in cell["outputs"]] for cell in notebook.code_cells(one)]
        for one in (stored, made)
    ]
    assert kinds[0] == kinds[1]
    assert sum(kind.count("display_data") for kind in kinds[1]) == 3
    said = "".join("".join(o.get("text", [])) for cell in notebook.code_cells(made) for o in cell["outputs"])
    assert all(float(accuracy) > 85 for accuracy in re.findall(r"final test accuracy ([\d.]+)%", said))
    assert "4 of 4 layers balanced, 4 of 4 BatchNorms removed" in said
    assert "BalNorm keeps 0.51 of what BatchNorm keeps" in said


def test_the_tutorial_runs(tmp_path):
    """The script is the page of the same name on the site."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "training_loop.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    accuracies = re.findall(r"^(\w+): test accuracy ([\d.]+)%$", done.stdout, re.MULTILINE)
    assert [name for name, _ in accuracies] == ["with_batchnorm", "with_balnorm", "averaged"]
    assert all(float(accuracy) > 85 for _, accuracy in accuracies)
    assert float(re.search(r"folded: Conv2d, largest difference (\S+)", done.stdout)[1]) < 1e-4


def test_the_example_of_fine_tuning_runs(tmp_path):
    command = [sys.executable, "-W", "ignore", str(ROOT / "examples" / "fine_tune.py")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "7 of 7 layers balanced, 7 of 7 BatchNorms removed" in done.stdout
    assert "100.0% of the predictions are equal" in done.stdout
    assert float(re.search(r"test accuracy ([\d.]+)%", done.stdout)[1]) > 85
    assert (tmp_path / "digits.onnx").exists()


@pytest.mark.slow
def test_the_example_of_a_trained_network_runs(tmp_path):
    from balnorm.bench.cli import main

    main(["train", "digits", "--norm", "batchnorm", "--width", "8", "--epochs", "4", "--out", str(tmp_path / "run")])
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / "convert_trained.py"), str(tmp_path / "run")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.findall(
        r"^(.*?) +([\d.]+)   one epoch more: +([\d.]+)   with frozen statistics: +([\d.]+)$", done.stdout, re.MULTILINE
    )
    accuracies = {name: [float(number) for number in numbers] for name, *numbers in found}
    assert list(accuracies) == ["batchnorm", "channel mass", "position mass"]
    assert len({now for now, *_ in accuracies.values()}) == 1
    assert done.stdout.count("100.0% of the predictions are equal") == 2
    assert all(later > 80 for _, *both in accuracies.values() for later in both)

    command = [*command[:3], str(ROOT / "examples" / "renewed_statistics.py"), str(tmp_path), str(tmp_path / "run")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = re.fullmatch(r"batchnorm, seed 0, epoch 4 +as saved +([\d.]+) +statistics anew +([\d.]+)\n", done.stdout)
    assert float(found[1]) == accuracies["batchnorm"][0]
    assert float(found[2]) > 80


@pytest.mark.parametrize(
    ("arguments", "answer"),
    [
        ("convert_trained.py nowhere", "nowhere"),
        ("renewed_statistics.py nowhere", "Usage: python examples/renewed_statistics.py"),
        ("renewed_statistics.py . nowhere", "nowhere does not exist"),
        ("optimisers.py nowhere", "cifar10 is not in nowhere"),
        ("deep_networks.py nowhere", "cifar10 is not in nowhere"),
        ("deep_networks.py nowhere one", "Usage: python examples/deep_networks.py"),
    ],
)
def test_examples_answer_a_mistake_without_a_traceback(tmp_path, monkeypatch, arguments, answer):
    name, *rest = arguments.split()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *rest])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(ROOT / "examples" / name), run_name="__main__")
    assert answer in end.value.code  # a text, which Python prints, and 1 is the exit code


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "CONTRIBUTING.md",
        "CHANGELOG.md",
        "benchmarks/README.md",
        *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/*.md"))),
        *(str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("docs/results/**/README.md"))),
    ],
)
def test_links_in_the_documents_lead_somewhere(document):
    path = ROOT / document
    for target in re.findall(r"\]\(([^)]+)\)", path.read_text()):
        if not target.startswith(("http", "#")):
            assert (path.parent / target.split("#")[0]).exists(), target


def test_nobody_is_sent_to_a_package_index_for_balnorm():
    """It is in none: what people are told to type has to work in a clone."""
    said = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.py"), *PACKAGE.rglob("*.py")]
    assert len(said) > 50
    for path in said:
        assert not re.search(r"pip install [^`#\n]*\bbalnorm(\[|\s|['\"]|$)", path.read_text(), re.MULTILINE), path


def test_the_version_is_the_same_everywhere():
    assert f"## [{balnorm.__version__}]" in (ROOT / "CHANGELOG.md").read_text()
    assert f"version: {balnorm.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert (
        re.search(r"!\[.*version (\S+),.*\]\(docs/status.svg\)", (ROOT / "README.md").read_text())[1]
        == balnorm.__version__
    )


def test_the_badge_says_what_the_package_does():
    project = (ROOT / "pyproject.toml").read_text()

    def find(pattern):
        return re.search(pattern, project, re.MULTILINE)[1]

    said = [text.text for text in ET.parse(ROOT / "docs" / "status.svg").iter("{http://www.w3.org/2000/svg}text")]
    assert dict(zip(said[::2], said[1::2], strict=True)) == {
        "status": find(r"Development Status :: \d - (\w+)").lower(),
        "version": balnorm.__version__,
        "Python": find(r'^requires-python = ">=([\d.]+)"') + "+",
        "torch": find(r'^dependencies = \["torch>=([\d.]+)"') + "+",
        "licence": find(r'^license = "(\w+)"'),
    }
