"""Text output: times, and tables with aligned columns."""

from collections.abc import Sequence


def milliseconds(value: float) -> str:
    """A time in four significant digits, three below a millisecond: `1234`, `12.34`, `0.118`."""
    if value < 1:
        return f"{value:#.3g}"
    return f"{value:.{max(0, 4 - len(str(int(value))))}f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows of equally many cells as lines: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])] for row in rows)
    return "\n".join("  ".join(line).rstrip() for line in lines)
