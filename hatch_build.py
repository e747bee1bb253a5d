"""Compile the native kernels when balnorm is built or installed, where there is a C compiler. They are optional.

``python hatch_build.py`` compiles them in place, for work on the C file itself.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # run by hand
    BuildHookInterface = object

CORE = Path(__file__).parent / "src" / "balnorm" / "_core" / "backends"
SOURCE, LIBRARY = CORE / "kernels.c", CORE / "kernels.so"
# -fopenmp-simd lets marked sums be vectorised; it brings no OpenMP library. Not -ffast-math: linked into a library, it
# would change the rounding of the whole process.
FLAGS = ["-O3", "-std=c11", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd", "-fvisibility=hidden"]
FLAGS += ["-fPIC", "-shared"]


def compile_kernels() -> str | None:
    """Compile the C file beside itself. Returns why it could not be done, or ``None``."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    if not shutil.which(compiler[0]):
        return f"there is no C compiler ({compiler[0]})"
    # Several versions of a function in one library need a recent compiler and the GNU C library; try them first.
    clones = platform.machine() in ("x86_64", "AMD64") and platform.libc_ver()[0] == "glibc"
    errors = ""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / LIBRARY.name
        for extra in (["-DBALNORM_CLONES"], []) if clones else ([],):
            command = [*compiler, *FLAGS, *extra, "-o", str(result), str(SOURCE), "-lm"]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
            except (OSError, subprocess.TimeoutExpired) as error:
                return f"the C compiler {compiler[0]} did not run: {error}"
            if done.returncode == 0:
                temporary = LIBRARY.with_suffix(".new")
                shutil.copyfile(result, temporary)
                temporary.replace(LIBRARY)  # a process may have the old one loaded
                return None
            errors = done.stderr.strip().splitlines()[0] if done.stderr.strip() else "no message"
    return f"the C compiler {compiler[0]} failed: {errors}"


class CompileKernels(BuildHookInterface):  # type: ignore[misc]
    """Puts the compiled kernels into wheels and editable installs; without a compiler the package is pure Python."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        if self.target_name != "wheel":
            return
        LIBRARY.unlink(missing_ok=True)
        problem = compile_kernels()
        if problem:
            self.app.display_warning(f"balnorm is installed without its native kernels, and slower on CPUs: {problem}")
            return
        build_data["pure_python"] = False
        build_data["artifacts"].append(f"/{LIBRARY.relative_to(Path(__file__).parent).as_posix()}")
        build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


if __name__ == "__main__":
    problem = compile_kernels()
    sys.exit(problem)
