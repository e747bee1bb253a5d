"""Functions and models of the user's own, which commands find by their names."""

import sys

import pytest
import torch

from balnorm.bench.errors import Failure
from balnorm.bench.user_code import load_function, load_model, names_a_function

NETWORK = """
import torch
from torch import nn


class Net(nn.Sequential):
    def __init__(self, width=4):
        super().__init__(nn.Conv2d(3, width, 3))


def build():
    return Net(8)


def with_example():
    return Net(), torch.ones(2, 3, 8, 8)


def pair():
    return Net(), "report"


def needs(width):
    return Net(width)


def fails():
    return {}["weights"]


def number():
    return 5
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A package in the current folder, and a file with the same contents in it."""
    (tmp_path / "own_package").mkdir()
    (tmp_path / "own_package" / "__init__.py").touch()
    (tmp_path / "own_package" / "networks.py").write_text(NETWORK)
    (tmp_path / "own_package" / "broken.py").write_text("1 / 0")
    (tmp_path / "own_package" / "lacking.py").write_text("import nothing_of_this_name")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("way", ["own_package.networks", "own_package/networks.py"])
def test_a_model_is_found_by_its_name(place, way):
    model, inputs = load_model(f"{way}:build")
    assert model[0].out_channels == 8
    assert inputs == ()
    model, inputs = load_model(f"{way}:Net", ["2,3,8,8", "5"])  # a class is a function, too
    assert model[0].out_channels == 4
    assert [tuple(each.shape) for each in inputs] == [(2, 3, 8, 8), (5,)]
    assert 0 <= inputs[0].min() < inputs[0].max() <= 1
    _, (example,) = load_model(f"{way}:with_example")
    assert torch.equal(example, torch.ones(2, 3, 8, 8))
    _, (example,) = load_model(f"{way}:with_example", ["1,3,9,9"])
    assert example.shape == (1, 3, 9, 9)


@pytest.mark.parametrize(
    ("target", "error", "answer"),
    [
        ("nowhere.networks:build", ValueError, "there is no module nowhere.networks, neither installed nor in "),
        ("own_package.nowhere:build", ValueError, "there is no module own_package.nowhere"),
        ("own_package.broken:build", Failure, r"broken cannot be imported \(ZeroDivisionError: division by zero"),
        ("own_package.lacking:build", Failure, r"cannot be imported \(ModuleNotFoundError: No module named 'nothing"),
        ("own_package.networks:built", ValueError, "has no function 'built'; it has Net, build, with_example"),
        ("nowhere.py:build", ValueError, "there is no file nowhere.py"),
        ("own_package.networks:needs", ValueError, r"must work without arguments \(missing a required .*'width'"),
        ("own_package.networks:fails", Failure, r"fails failed: KeyError: 'weights' \(networks.py, line 28\)"),
        ("own_package/networks.py:fails", Failure, r"fails failed: KeyError: 'weights' \(networks.py, line 28\)"),
        ("own_package.networks:number", ValueError, "must return a model, .*, but it returned int"),
        ("own_package.networks:pair", ValueError, "must return a model, .*, but it returned Net, str"),
    ],
)
def test_what_is_no_model_is_refused_with_a_sentence(place, target, error, answer):
    with pytest.raises(error, match=answer):
        load_model(target)


@pytest.mark.parametrize("shape", ["", "3,", "1,3,x", "1, 3", "0,3", "1x3"])
def test_shapes_that_are_none(shape):
    with pytest.raises(ValueError, match=r"a shape is given as 1,3,224,224 .*, not '"):
        load_model("json:loads", [shape])


def test_functions_of_installed_modules_are_found_too():
    assert load_function("torch.nn", "Identity") is torch.nn.Identity


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("package.module:build", True),
        ("module:build", True),
        ("some folder/net.py:build", True),
        ("runs/a", False),
        ("runs/a:b", False),
        ("net.py", False),
        ("package.module", False),
        ("package.module:build:this", False),
        ("3d:build", False),
    ],
)
def test_what_names_a_function(text, expected):
    assert names_a_function(text) == expected
