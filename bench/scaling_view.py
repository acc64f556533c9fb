"""Show what ``bench.scaling`` measured: its picture, and its section of the results page."""

from pathlib import Path

from .compare import ROOT
from .rst import NOTHING, heading, table, threads

PICTURE = ROOT / "docs" / "pictures" / "scaling.png"
MIB = 1 << 20

_COLOURS = {"mha_fast": "tab:blue", "torch": "tab:orange", "numpy": "tab:grey"}
_DPI = 90
# A call that stays within pages the process had already shows as 0, which has no logarithm.
_LEAST_MIB = 0.01

_TEXT = """\
One head of width 64 in float32 on {}. Times are nanoseconds per pair of a query and a key, causal ones too; those
of the window, in which a query sees itself and the 1024 keys before it, are nanoseconds per query. Memory is what
one call needs above its inputs and its output. Plain NumPy stops where its array of scores would pass 2 GB. A
causal call of 8 heads and 2048 queries and keys takes {:.2f} of the time of a full one.

.. figure:: pictures/scaling.png
   :alt: time and memory of one call against the length, both axes logarithmic
"""


def section(scaling: dict) -> str:
    """Return the section of the page."""
    series = _series(scaling)
    weighed = {key: points for key, points in series.items() if _has_bytes(points)}
    text = _TEXT.format(threads(scaling["num_threads"]), scaling["causal_share"])
    times = _table("ns", series, _nanoseconds)
    memory = _table("MiB", weighed, _mebibytes)
    return "\n".join([heading("Time and memory against length", "-"), text, times, memory])


def _table(unit, series, cell):
    lengths = sorted({length for points in series.values() for length in points})
    body = [
        [f"{length:,}", *(cell(points.get(length)) for points in series.values())]
        for length in lengths
    ]
    return table([f"length, {unit}", *map(_title, series)], body)


def _series(scaling):
    """Contender, causal or not, and window -> length -> point; contender by contender."""
    series = {}
    for point in scaling["points"]:
        key = (point["contender"], point["is_causal"], point["window"])
        series.setdefault(key, {})[point["length"]] = point
    return dict(sorted(series.items(), key=_place))


def _place(item):
    contender, is_causal, window = item[0]
    return list(_COLOURS).index(contender), window is not None, is_causal


def _title(key):
    contender, is_causal, window = key
    if window is not None:
        return f"{contender}, window"
    return f"{contender}, causal" if is_causal else contender


def _has_bytes(points):
    return any(point["extra_bytes"] is not None for point in points.values())


def _nanoseconds(point):
    if point is None:
        return NOTHING
    n = point["length"]
    return f"{point['seconds'] * 1e9 / (n * n if point['window'] is None else n):.3g}"


def _mebibytes(point):
    if point is None or point["extra_bytes"] is None:
        return NOTHING
    return f"{point['extra_bytes'] / MIB:.1f}"


def draw(scaling: dict, path: Path) -> None:
    """Draw time and memory against length."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.5), layout="constrained")
    time_axes, memory_axes = figure.subplots(1, 2)
    for key, points in _series(scaling).items():
        lengths = sorted(points)
        seconds = [points[n]["seconds"] for n in lengths]
        time_axes.loglog(lengths, seconds, **_style(key))
        if _has_bytes(points):
            mebibytes = [max(points[n]["extra_bytes"] / MIB, _LEAST_MIB) for n in lengths]
            memory_axes.loglog(lengths, mebibytes, **_style(key))
    time_axes.set(title="time of one call", ylabel="seconds")
    memory_axes.set(title="memory above inputs and output", ylabel="MiB")
    ticks = sorted({point["length"] for point in scaling["points"]})
    for axes in (time_axes, memory_axes):
        axes.set_xlabel("queries and keys")
        axes.set_xticks(ticks, [str(n) for n in ticks], rotation=45)
        axes.set_xticks([], minor=True)
        axes.grid(alpha=0.3)
        axes.legend(loc="upper left", fontsize="small")
    figure.savefig(path, dpi=_DPI)


def _style(key):
    contender, is_causal, window = key
    dashes = ":" if window is not None else "--" if is_causal else "-"
    return {
        "label": _title(key),
        "color": _COLOURS[contender],
        "linestyle": dashes,
        "marker": "x" if is_causal else ".",  # two lines may be one upon the other
    }
