"""Plain-text tables, for reports that print well in any terminal or log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

__all__ = ["text_table"]


def text_table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Set a table with columns as wide as their widest cell, numbers aligned right and text left.

    Example:
        >>> print(text_table(["layer", "gain"], [["conv1", "1.25"], ["layer1.conv2", "10.5"]]))
        layer         gain
        ------------  ----
        conv1         1.25
        layer1.conv2  10.5
    """
    table = [list(row) for row in rows]
    columns = list(zip(header, *table, strict=True))
    widths = [max(map(len, column)) for column in columns]
    numeric = [all(map(_is_number, column[1:])) for column in columns]

    def line(cells: Sequence[str]) -> str:
        padded = [
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(cells, widths, numeric, strict=True)
        ]
        return "  ".join(padded).rstrip()

    return "\n".join([line(header), "  ".join("-" * width for width in widths), *map(line, table)])


def _is_number(cell: str) -> bool:
    return not cell.strip("-+.,0123456789e%x")
