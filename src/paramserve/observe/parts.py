"""Tables of text that say what a narrow terminal leaves out of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich.cells import cell_len
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

GAP = 2
"""Spaces between plain columns."""
RULED, RULED_EACH = 1, 3
"""Columns of a terminal that the lines of a table take: at its end, and for each of its columns."""


class Part:
    """Rows about one kind of thing.

    Args:
        columns: their names.
        least: of these, those that a narrow terminal does without; the first of them goes first.
    """

    def __init__(self, title: str, *columns: str, least: Sequence[str] = ()) -> None:
        assert set(least) < set(columns)
        self.title = title
        self.columns = columns
        self.rows: list[tuple[str, ...]] = []
        self._least = tuple(least)

    def add_row(self, *cells: str) -> None:
        self.rows.append(cells)

    def left_out(self, width: int, each: int, end: int) -> list[str]:
        """The columns that do not fit, in their order.

        Args:
            width: of the terminal.
            each, end: what each column takes besides its cells, and the last one more.
        """
        wide = dict(zip(self.columns, self._widths(), strict=True))
        omitted: set[str] = set()
        for name in self._least:
            if sum(wide.values()) + each * len(wide) + end <= width:
                break
            del wide[name]
            omitted.add(name)
        return [name for name in self.columns if name in omitted]

    def as_table(self, width: int) -> RenderableType:
        """Table for a terminal of this many columns; text without room is folded in its cell."""
        out = self.left_out(width, RULED_EACH, RULED)
        table = Table(title=self.title, title_justify="left")
        for name in self.columns:
            if name not in out:
                table.add_column(name, overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in self._without(row, out)))
        return Group(table, Text(omission_line(out, width))) if out else table

    def as_lines(self, width: int | None = None) -> list[str]:
        """Plain columns, as wide as what they hold; with a width, without those that have no room,
        which a last line names."""
        out = self.left_out(width + GAP, GAP, 0) if width is not None else []
        rows = [self._without(row, out) for row in (self.columns, *self.rows)]
        widths = [max(map(cell_len, cells)) for cells in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            padded = (
                cell + " " * (wide - cell_len(cell)) for cell, wide in zip(row, widths, strict=True)
            )
            lines.append((" " * GAP).join(padded).rstrip())
        return [*lines, omission_line(out, width)] if width is not None and out else lines

    def _widths(self) -> list[int]:
        return [max(map(cell_len, cells)) for cells in zip(self.columns, *self.rows, strict=True)]

    def _without(self, cells: Iterable[str], out: Sequence[str]) -> list[str]:
        named = zip(self.columns, cells, strict=True)
        return [cell for name, cell in named if name not in out]


def omission_line(out: Sequence[str], width: int) -> str:
    """The line that names what was left out."""
    return f"left out at {width} columns: {', '.join(out)}"
