"""Pictures of what heads look at. Needs matplotlib: ``pip install matplotlib``.

    head_maps   a map of layers and heads for each of several measurements
    weight_maps a map of queries and keys for each of several heads
    token_views lines from token to token, a panel for each of several heads

All return a figure, to be kept by its `savefig`. Nothing in them is told by hue: the maps run
from dark to light in colours that look alike to the colour-blind (cividis), with the number in each
cell of a map of heads, and the lines differ in width and darkness. Texts are drawn as they are; a
dollar sign in one begins no formula.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import _checks
from .._typing import Array, ArrayLike

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["head_maps", "token_views", "weight_maps"]

COLOURS = "cividis"  # Nuñez, Anderton and Renslow 2018: made for all kinds of colour vision
PANEL_WIDTH, ROW_HEIGHT = 6.4, 0.34  # inches, of a map of 12 heads; numbers stay readable in print
VIEW_WIDTH, LINE_HEIGHT = 4.2, 0.24  # inches, of a panel of lines
CELL, LARGEST_PANEL, MOST_NAMES = 0.24, 7.0, 64  # inches, and tokens that can still be written out
FAINTEST = 0.02  # share of the weight below which a line is left out: it would be a hair's width
LINE_WIDTH = 7  # points, of all the weight


# ---- maps of heads ------------------------------------------------------------------------------


def head_maps(
    measurements: Mapping[str, ArrayLike],
    n_column: int = 2,
    *,
    units: Mapping[str, str] | None = None,
) -> Figure:
    """One map per measurement: a row for each layer, a column for each head.

    Parameters
    ----------
    measurements : mapping of str to array, (n_layer, n_head)
        Title and numbers of each map; all of one shape.
    n_column : int
        Maps side by side.
    units : mapping of str to str, optional
        For a title, what its numbers are measured in. Maps of one unit share their colours, which
        begin at 0, so that they can be compared; those without a unit share theirs too.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    TypeError
        A masked array.
    ValueError
        Nothing to draw, or shapes that differ.
    ModuleNotFoundError
        matplotlib is missing.
    """
    tables = _tables("measurements", measurements)
    shapes = {numbers.shape for numbers in tables.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"measurements has shapes {sorted(shapes)}; expected one (n_layer, n_head)"
        )
    n_layer, _ = next(iter(shapes))
    n_column = min(_checks.positive_int("n_column", n_column), len(tables))
    n_row = -(-len(tables) // n_column)
    figure = _figure(PANEL_WIDTH * n_column, (ROW_HEIGHT * n_layer + 1.1) * n_row)
    panels = figure.subplots(n_row, n_column, squeeze=False).flat
    unit_of = {title: (units or {}).get(title) for title in tables}
    scales = {
        unit: _scale([x for title, x in tables.items() if unit_of[title] == unit])
        for unit in set(unit_of.values())
    }
    for panel, (title, numbers) in zip(panels, tables.items(), strict=False):
        _draw_head_map(figure, panel, title, numbers, scales[unit_of[title]])
    for panel in panels[len(tables) :]:
        panel.remove()
    return figure


def _draw_head_map(
    figure: Figure, panel: Any, title: str, numbers: Array, scale: tuple[float, float]
) -> None:
    image = panel.imshow(numbers, cmap=COLOURS, aspect="auto", vmin=scale[0], vmax=scale[1])
    for (layer, head), number in np.ndenumerate(numbers):
        # near the middle of cividis, black and white stand out from it equally
        ink = "black" if image.norm(number) > 0.46 else "white"
        text = _short(number)
        panel.text(head, layer, text, color=ink, ha="center", va="center", fontsize=7.5)
    panel.set_title(title, parse_math=False)
    panel.set(xlabel="head", ylabel="layer", xticks=range(numbers.shape[1]))
    panel.set_yticks(range(numbers.shape[0]))
    panel.tick_params(length=0)
    figure.colorbar(image, ax=panel, pad=0.02)


def _short(number: float) -> str:
    """Two or three digits, without the 0 in front of the point: cells are narrow."""
    if np.isnan(number):
        return ""
    text = f"{number:.1f}" if abs(number) >= 9.995 else f"{number:.2f}"
    return text.replace("0.", ".", 1) if abs(number) < 0.995 else text


# ---- maps of weights ----------------------------------------------------------------------------


def weight_maps(
    weights: Mapping[str, ArrayLike],
    queries: Sequence[str] | None = None,
    keys: Sequence[str] | None = None,
) -> Figure:
    """A panel per head: a row for each query, a column for each key, the lighter the more weight.

    Parameters
    ----------
    weights : mapping of str to array, (n_query, n_key)
        Title and attention weights of each head; all of one shape. All panels have the same
        colours, from 0 on.
    queries, keys : sequence of str, optional
        Names of the rows and of the columns; their numbers when not given, or when they are too
        many to be read.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    TypeError
        A masked array.
    ValueError
        Nothing to draw, shapes that differ, or names that do not fit them.
    ModuleNotFoundError
        matplotlib is missing.
    """
    tables = _tables("weights", weights)
    shapes = {table.shape for table in tables.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(f"weights has shapes {sorted(shapes)}; expected one (n_query, n_key)")
    shape = next(iter(shapes))
    for name, texts, n in zip(("queries", "keys"), (queries, keys), shape, strict=True):
        if texts is not None and len(texts) != n:
            raise ValueError(f"{name} has {len(texts)} names; expected {n} to match weights")
    height, width = (min(max(CELL * n, 2.0), LARGEST_PANEL) for n in shape)
    figure = _figure((width + 1.6) * len(tables), height + 1.6)
    low, high = _scale(list(tables.values()))
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, (title, table) in zip(panels, tables.items(), strict=True):
        image = panel.imshow(table, cmap=COLOURS, aspect="auto", vmin=low, vmax=high)
        panel.set_title(title, parse_math=False)
        panel.set(xlabel="key (is looked at)", ylabel="query (looks)")
        _name_ticks(panel.xaxis, keys, rotation=90)
        _name_ticks(panel.yaxis, queries)
    figure.colorbar(image, ax=panels.tolist(), label="weight", pad=0.02)
    return figure


def _name_ticks(axis: Any, names: Sequence[str] | None, **style: Any) -> None:
    if names is not None and len(names) <= MOST_NAMES:
        axis.set_ticks(range(len(names)), names, fontsize=9, parse_math=False, **style)
        axis.set_tick_params(length=0)
    else:
        axis.get_major_locator().set_params(integer=True)


# ---- lines between tokens -----------------------------------------------------------------------


def token_views(
    tokens: Sequence[str],
    weights: Mapping[str, ArrayLike],
    sources: Mapping[str, Sequence[int]] | None = None,
) -> Figure:
    """A panel per head: lines from each token to those it draws on, the wider the more.

    Parameters
    ----------
    tokens : sequence of str
        Listed downwards on both sides; those that look on the left.
    weights : mapping of str to array, (n_token, n_token)
        Title and attention weights of each head.
    sources : mapping of str to sequence of int, optional
        For a title, the tokens whose lines are drawn black and named in bold; the others' are grey.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    TypeError
        A masked array.
    ValueError
        Nothing to draw, or weights that do not fit the tokens.
    ModuleNotFoundError
        matplotlib is missing.
    """
    n_token = len(tokens)
    tables = _tables("weights", weights)
    if not tables:
        raise ValueError("weights is empty; expected the weights of one head at least")
    for title, table in tables.items():
        if table.shape != (n_token, n_token):
            raise ValueError(
                f"weights of {title!r} have shape {table.shape}; expected {(n_token, n_token)}"
            )
    figure = _figure(VIEW_WIDTH * len(tables), LINE_HEIGHT * (n_token + 1) + 0.9)
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, (title, table) in zip(panels, tables.items(), strict=True):
        _draw_lines(panel, tokens, table, set((sources or {}).get(title, ())))
        panel.set_title(title, parse_math=False)
    return figure


def _draw_lines(panel: Any, tokens: Sequence[str], weights: Array, chosen: set[int]) -> None:
    heaviest_last = np.argsort(weights, axis=None)
    for place in zip(*np.unravel_index(heaviest_last, weights.shape), strict=True):
        source, target = map(int, place)
        weight = float(weights[source, target])
        if weight < FAINTEST:
            continue
        stands_out = source in chosen or not chosen
        panel.plot(
            (0, 1),
            (source, target),
            color="black" if stands_out else "0.8",
            linewidth=LINE_WIDTH * weight,
            alpha=min(1.0, 0.15 + weight) if stands_out else 0.6,
            solid_capstyle="butt",
            zorder=3 if stands_out else 2,
        )
    for i, token in enumerate(tokens):
        bold = "bold" if i in chosen else "normal"
        style = {"va": "center", "fontsize": 9, "parse_math": False}
        panel.text(-0.03, i, token, ha="right", fontweight=bold, **style)
        panel.text(1.03, i, token, ha="left", **style)
    for side, x, text in (("right", -0.03, "looks"), ("left", 1.03, "is looked at")):
        panel.text(x, -1.1, text, ha=side, va="center", fontsize=8, style="italic")
    panel.set_xlim(-0.4, 1.4)
    panel.set_ylim(len(tokens) - 0.4, -1.6)
    panel.axis("off")


# ---- what all of them need ----------------------------------------------------------------------


def _tables(name: str, tables: Mapping[str, ArrayLike]) -> dict[str, Array]:
    """Return the arrays by their titles, float64."""
    return {
        title: _checks.reals(f"{name}[{title!r}]", table).astype(np.float64, copy=False)
        for title, table in tables.items()
    }


def _scale(tables: Sequence[Array]) -> tuple[float, float]:
    """Ends of the colours for all of these: 0 and the largest number, and below 0 if there is any."""
    known = np.concatenate([table[np.isfinite(table)] for table in tables])
    low, high = float(known.min(initial=0.0)), float(known.max(initial=0.0))
    return low, high if high > low else low + 1


def _figure(width: float, height: float) -> Figure:
    """An empty figure, made without pyplot, which would keep it and might open a window."""
    figure: Figure = import_module("matplotlib.figure").Figure(
        (width, height), layout="constrained"
    )
    return figure
