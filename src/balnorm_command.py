"""The command ``balnorm``: its general help and version without torch, and all else from :mod:`balnorm.bench.cli`.

It stands beside the package because importing anything from the package imports torch, which takes seconds.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from importlib.metadata import version

__all__ = ["USAGE", "main"]

USAGE = """usage: balnorm COMMAND [options]

  compare     train several normalisations over several seeds, and report
  train       train one network; without options, list the recipes
  report      write figures, tables and a web page for a study, at any time
  pack        write a study's finished runs as two files, to publish or archive
  data        list, download and check data sets
  bench       measure the speed and memory of normalisations on this machine
  inspect     show how well balanced a trained network's layers are
  fold        write a trained network as plain convolutions
  completion  print a completion script for bash, zsh or fish

Repeat a command to resume what was stopped. `balnorm COMMAND --help` shows options and examples, and
`balnorm COMMAND RECIPE --help` the values of a recipe. `balnorm --version` shows the version.

examples:
  balnorm compare digits --jobs 2                               a few minutes, nothing to download
  balnorm compare cifar10-desk --norms balnorm batchnorm --seeds 5 --out studies/x --root data
  balnorm compare experiment.py:train --norms balnorm batchnorm  a training function of your own
  balnorm report studies/x
  balnorm train digits --seed 3 --out runs/a                    half a minute
  balnorm fold runs/a --out digits.onnx
  balnorm bench mynet.py:build --shape 8,3,224,224              a model of yours, as it is and converted
  balnorm data get cifar10 --root data                          162 MB; resumes broken downloads

exit codes: 0 done, 1 failed, 2 a mistake in the command, 130 Ctrl-C
"""


def main() -> int:
    """Run the command line, if the packages that it needs are installed."""
    given = sys.argv[1:]
    if given in ([], ["-h"], ["--help"], ["--version"]):
        text = f"balnorm {version('balnorm')}\n" if given == ["--version"] else USAGE
        with contextlib.suppress(OSError):  # a closed pipe, a full disk: the command line below can answer those
            os.write(1 if given else 2, text.encode())
            return 0 if given else 2
    try:
        from balnorm.bench.cli import main as run
    except ModuleNotFoundError as error:
        advice = "pip install '.[bench]' in a clone of the repository"
        print(f"balnorm: the command line needs {error.name}: {advice}", file=sys.stderr)
        return 1
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script sets this for what it starts in the background. `kill -INT` must save and stop a study there too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()
