"""What a type checker sees: every option, and that a layer's output is a tensor."""

import subprocess
import sys
import typing
from pathlib import Path

import pytest
from torch.distributed import ProcessGroup

from balnorm._core import options as module
from balnorm._core.options import LayerKeywords, LayerOptions, OptionKeywords, Options

PROGRAM = """
import torch
from torch import Tensor, nn

import balnorm.functional as BF
from balnorm import BalNormConv2d, BalNormConvTranspose2d, BalNormLinear, ChannelAffine, convert

x, w, net = torch.rand(2, 3, 8, 8), torch.rand(8, 3, 3, 3), nn.Sequential(nn.Conv2d(3, 8, 3))
conv = BalNormConv2d(3, 8, 3, mass="position", shift=False, momentum=None, output_scale=1.0, device="cpu")
BalNormConvTranspose2d(3, 8, 3, one_pass=False)(x, output_size=[10, 10]).relu()
BalNormLinear(8, 2, affine=False, track_running_stats=False)
BalNormConv2d.from_conv(nn.Conv2d(3, 8, 3), bias=False, centred=True, dtype=torch.float64)
sequential: nn.Sequential = convert(net, one_pass=False, stats_fraction=0.25, strict=True)[0]
y: Tensor = BF.bal_conv2d(x, w, mass="position", one_pass=False)

BalNormConv2d(3, 8, 3, mas="position")  # error: "mas"
BalNormConv2d(3, 8, 3, mass="positions")  # error: "mass"
BalNormConvTranspose2d(3, 8, 3, one_pas=False)  # error: "one_pas"
BalNormLinear(8, 2, momentum="0.1")  # error: "momentum"
BalNormConv2d.from_conv(nn.Conv2d(3, 8, 3), bia=False)  # error: "bia"
convert(net, one_pas=False)  # error: "one_pas"
BF.bal_conv2d(x, w, affine=False)  # error: "affine"
conv(x).no_such_method()  # error: "no_such_method"
ChannelAffine(3)(x).no_such_method()  # error: "no_such_method"
"""


def test_a_type_checker_finds_wrong_options_and_no_others(tmp_path):
    pytest.importorskip("mypy")
    file = tmp_path / "program.py"
    file.write_text(PROGRAM)
    root = Path(__file__).parent.parent
    command = [sys.executable, "-m", "mypy", "--strict", file]  # with the options, and so the cache, of make check
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    found = [line.split(":", 3) for line in done.stdout.splitlines() if ": error: " in line]
    expected = [
        (number, line.rpartition("# error: ")[2])
        for number, line in enumerate(PROGRAM.splitlines(), 1)
        if "# error: " in line
    ]
    assert [int(number) for _, number, *_ in found] == [number for number, _ in expected], done.stdout + done.stderr
    assert all(name in message for (*_, message), (_, name) in zip(found, expected, strict=True)), done.stdout


@pytest.mark.parametrize(("keywords", "checked"), [(OptionKeywords, Options), (LayerKeywords, LayerOptions)])
def test_the_keywords_for_type_checkers_are_the_options(monkeypatch, keywords, checked):
    """They are written twice, because no type checker reads the one from the other."""
    monkeypatch.setattr(module, "ProcessGroup", ProcessGroup, raising=False)  # imported for type checkers only
    assert typing.get_type_hints(keywords) == typing.get_type_hints(checked)
