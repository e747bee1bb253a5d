"""What a command can end with besides success. It imports nothing, so that the command line starts at once."""

__all__ = ["Failure", "Stopped", "sentence"]


class Failure(Exception):  # noqa: N818  # its subclasses say of what
    """A file, the data or the machine is not what a command needs. The message says what is wrong, and what to do."""


class Stopped(Exception):  # noqa: N818  # it is no error
    """Somebody pressed Ctrl-C. What was under way is saved, and the message says how to go on."""


def sentence(error: BaseException | None) -> str:
    """What an error says, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)
