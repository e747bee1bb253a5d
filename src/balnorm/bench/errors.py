"""The ways in which a command can fail, and how to report them."""

__all__ = ["Failure", "Stopped", "is_out_of_memory", "many", "one_line", "sentence", "shortened"]


class Failure(Exception):  # noqa: N818  # its subclasses say of what
    """A file, the data or the machine is not what a command needs. The message says what is wrong and what to do."""


class Stopped(Exception):  # noqa: N818  # it is no error
    """Someone pressed Ctrl-C. Work in progress has been saved, and the message says how to resume."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on a GPU or a CPU: torch's errors have no class of their own on the latter."""
    signs = ("out of memory", "not enough memory", "allocate memory")
    return isinstance(error, MemoryError) or any(sign in str(error).lower() for sign in signs)


def many(count: int, what: str) -> str:
    """As ``1 run`` or ``2 runs``."""
    return f"{count:,} {what}" if count == 1 else f"{count:,} {what}s"


def sentence(error: BaseException | None) -> str:
    """An error's message, without its number."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def one_line(error: BaseException) -> str:
    """An error's message without line breaks, shortened, or the error's name if it has none."""
    return shortened(" ".join(str(error).split())) or type(error).__name__


def shortened(text: str, most: int = 2000) -> str:
    """A text cut to about ``most`` characters: the middle of a longer one is left out."""
    return text if len(text) <= most else f"{text[: most // 2]} ... {text[-most // 2 :]}"
