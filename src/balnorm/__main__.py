"""The command ``balnorm``, also as ``python -m balnorm``."""

from __future__ import annotations

import signal
import sys

__all__ = ["main"]


def main() -> int:
    """Run the command line, if what it needs is installed."""
    try:
        from balnorm.bench.cli import main as run
    except ModuleNotFoundError as error:
        advice = "pip install '.[bench]' in a clone of the repository"
        print(f"balnorm: the command line needs {error.name}: {advice}", file=sys.stderr)
        return 1
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # As a script starts what it puts into the background. `kill -INT` is to save and stop a study there too.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return run()


if __name__ == "__main__":
    sys.exit(main())
