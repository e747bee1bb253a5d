"""Locks on files, where the system has them."""

from __future__ import annotations

import errno
from typing import IO, Any

__all__ = ["lock"]

_NO_LOCKS = {errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP}


def lock(file: IO[Any], *, wait: bool) -> bool:
    """Lock a file, open for writing, against other processes until it is closed. Returns whether that is possible.

    It is not on Windows, and on some file systems. Raises a BlockingIOError if another process has it locked, unless
    ``wait`` is true.
    """
    try:
        import fcntl
    except ImportError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _NO_LOCKS:
            return False
        raise
    return True
