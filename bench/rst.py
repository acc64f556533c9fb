"""The few things of reStructuredText that the results page is made of."""

NOTHING = "–"  # in a cell


def heading(text: str, line: str) -> str:
    """Return a heading of the level that `line` marks."""
    return f"{text}\n{line * len(text)}\n"


def table(titles: list[str], rows: list[list[str]]) -> str:
    """Return a table; no cell of its first column may be empty."""
    widths = [max(map(len, column)) for column in zip(titles, *rows, strict=True)]

    def line(row):
        return "  ".join(
            f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)
        ).rstrip()

    rule = "  ".join("=" * width for width in widths)
    return "\n".join([rule, line(titles), rule, *map(line, rows), rule, ""])


def threads(n: int) -> str:
    """Return the number of threads in words."""
    return f"{n} thread" if n == 1 else f"{n} threads"
