"""Pictures of what heads look at. Needs matplotlib: ``pip install matplotlib``.

    head_maps   a map of layers and heads for each of several measurements
    token_views lines from token to token, a panel for each of several heads

Both return a figure, to be kept by its `savefig`. Nothing in them is told by hue: the maps run
from dark to light in colours that look alike to the colour-blind (cividis), with the number in each
cell, and the lines differ in width and darkness.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np

from .._typing import Array

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["head_maps", "token_views"]

COLOURS = "cividis"  # Nuñez, Anderton and Renslow 2018: made for all kinds of colour vision
PANEL_WIDTH, ROW_HEIGHT = 6.4, 0.34  # inches, of a map of 12 heads; numbers stay readable in print
VIEW_WIDTH, LINE_HEIGHT = 4.2, 0.24  # inches, of a panel of lines
FAINTEST = 0.02  # share of the weight below which a line is left out: it would be a hair's width
LINE_WIDTH = 7  # points, of all the weight


def head_maps(measurements: Mapping[str, Array], n_column: int = 2) -> Figure:
    """One map per measurement: a row for each layer, a column for each head.

    Parameters
    ----------
    measurements : mapping of str to array, (n_layer, n_head)
        Title and numbers of each map; all of one shape.
    n_column : int
        Maps side by side.

    Returns
    -------
    matplotlib.figure.Figure

    Raises
    ------
    ValueError
        Nothing to draw, or shapes that differ.
    ModuleNotFoundError
        matplotlib is missing.
    """
    shapes = {np.shape(numbers) for numbers in measurements.values()}
    if len(shapes) != 1 or len(next(iter(shapes))) != 2:
        raise ValueError(
            f"measurements has shapes {sorted(shapes)}; expected one (n_layer, n_head)"
        )
    n_layer, _ = next(iter(shapes))
    n_column = min(n_column, len(measurements))
    n_row = -(-len(measurements) // n_column)
    figure = _figure(PANEL_WIDTH * n_column, (ROW_HEIGHT * n_layer + 1.1) * n_row)
    panels = figure.subplots(n_row, n_column, squeeze=False).flat
    for panel, (title, numbers) in zip(panels, measurements.items(), strict=False):
        _draw_map(figure, panel, title, np.asarray(numbers, np.float64))
    for panel in panels[len(measurements) :]:
        panel.remove()
    return figure


def _figure(width: float, height: float) -> Figure:
    """An empty figure, made without pyplot, which would keep it and might open a window."""
    figure: Figure = import_module("matplotlib.figure").Figure(
        (width, height), layout="constrained"
    )
    return figure


def _draw_map(figure: Figure, panel: Any, title: str, numbers: Array) -> None:
    image = panel.imshow(numbers, cmap=COLOURS, aspect="auto")
    for (layer, head), number in np.ndenumerate(numbers):
        # near the middle of cividis, black and white stand out from it equally
        ink = "black" if image.norm(number) > 0.46 else "white"
        text = _short(number)
        panel.text(head, layer, text, color=ink, ha="center", va="center", fontsize=7.5)
    panel.set_title(title)
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


def token_views(
    tokens: Sequence[str],
    weights: Mapping[str, Array],
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
    ValueError
        Nothing to draw, or weights that do not fit the tokens.
    ModuleNotFoundError
        matplotlib is missing.
    """
    n_token = len(tokens)
    if not weights:
        raise ValueError("weights is empty; expected the weights of one head at least")
    for title, table in weights.items():
        if np.shape(table) != (n_token, n_token):
            raise ValueError(
                f"weights of {title!r} have shape {np.shape(table)}; expected {(n_token, n_token)}"
            )
    figure = _figure(VIEW_WIDTH * len(weights), LINE_HEIGHT * n_token + 0.9)
    panels = figure.subplots(1, len(weights), squeeze=False)[0]
    for panel, (title, table) in zip(panels, weights.items(), strict=True):
        chosen = set((sources or {}).get(title, ()))
        _draw_lines(panel, tokens, np.asarray(table), chosen)
        panel.set_title(title)
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
        panel.text(-0.03, i, token, ha="right", va="center", fontsize=9, fontweight=bold)
        panel.text(1.03, i, token, ha="left", va="center", fontsize=9)
    panel.set_xlim(-0.4, 1.4)
    panel.set_ylim(len(tokens) - 0.4, -0.6)
    panel.axis("off")
