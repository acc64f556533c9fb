"""Tables of one cell per head, as text."""

from collections.abc import Callable
from typing import Any

import numpy as np

from .._typing import Array

__all__ = ["grid", "head_name"]


def grid(numbers: Array, show: Callable[[Any], str]) -> str:
    """A column per head and, where there are more axes, a row for each layer.

    Parameters
    ----------
    numbers : array, (n_head,) or (..., n_head)
    show : callable
        Text of one cell.
    """
    n_head = numbers.shape[-1]
    cells = [[show(number) for number in row] for row in numbers.reshape(-1, n_head)]
    headings = [str(head) for head in range(n_head)]
    width = max(map(len, headings + [cell for row in cells for cell in row]), default=0)
    names = ["head"] + [_layer_name(place) for place in np.ndindex(numbers.shape[:-1])]
    margin = max(map(len, names))
    lines = [
        name.ljust(margin) + "".join(" " + cell.rjust(width) for cell in row)
        for name, row in zip(names, [headings, *cells], strict=True)
    ]
    return "\n".join(lines)


def head_name(place: tuple[int, ...]) -> str:
    """How a table names one head: its number, after that of its layer where there is one."""
    *layer, head = place
    return f"{_layer_name(tuple(layer))} head {head}".lstrip()


def _layer_name(place: tuple[int, ...]) -> str:
    return f"layer {', '.join(map(str, place))}" if place else ""
