"""Write ``docs/results.rst`` from the measurements that are kept in ``bench/results/``."""

from itertools import groupby
from pathlib import Path

from . import scaling_view, store
from .cases import DTYPES
from .compare import ROOT, TIE, cells, columns, is_tie, peaks
from .measure import N_RATIO, Measurement
from .rst import NOTHING, heading, table, threads

PAGE = ROOT / "docs" / "results.rst"

_INTRODUCTION = f"""\
Results
=======

.. Written by ``python -m bench.report --render`` from the files in bench/results/: do not edit.

Against each library in a process of its own, in alternating turns, on the same number of threads. A
ratio is the time of the other library over that of ``mha_fast``, so above 1 ``mha_fast`` is faster:
the median of {N_RATIO} ratios between shortest times. Each library got the layout of arrays that it likes best,
prepared outside the timing, and the fastest of its ways to compute the case. Every result was checked against
float64 before it was timed. :doc:`benchmarks` says how to repeat this, and ``bench/README.md`` how to
read it.
"""

_EMPTY = "\nNothing has been measured yet: ``python -m bench.report`` fills this page.\n"

_QUICK = "\n.. warning:: Some of this comes from quick runs, which are too short to quote.\n"

_DETAILS = """\
Details
-------

Shape: batch, heads (/key and value heads where fewer), queries, keys, width. FMA: fused multiply-adds out of
registers. Matrix unit: of its bfloat16 multiply-adds; in brackets the same with the bfloat16 products counted that
one product of float32 or float16 takes there (6; float32 in precision high: 3). Read: streaming read by NumPy. All three peaks are of the same number of
threads, measured between the timings of the same case. Error: the largest against float64 of the same
(rounded) inputs.
"""


def write(folder: Path, path: Path) -> None:
    """Render all that is kept in `folder` to `path`."""
    path.write_text(
        render(store.read_parts(folder), store.read(folder / store.SCALING)), encoding="utf-8"
    )


def render(parts: list[store.Part], scaling: dict | None) -> str:
    """Return the page."""
    if not parts and scaling is None:
        return _INTRODUCTION + _EMPTY
    quick = any(part.quick for part in parts) or (scaling is not None and scaling["quick"])
    runs = [*map(vars, parts), *([] if scaling is None else [scaling])]
    sections = [_INTRODUCTION, _QUICK if quick else "", _provenance(parts, runs)]
    sections += [_summary(*group) for group in _by_dtype(parts)]
    if scaling is not None:
        sections.append(scaling_view.section(scaling))
    if parts:
        sections += [_DETAILS, *(_details(*group) for group in _by_dtype(parts))]
    sections.append(_commands(runs))
    return "\n".join(filter(None, sections))


def _by_dtype(parts):
    def key(part):
        return DTYPES.index(part.dtype), part.precision != "highest"

    for _, group in groupby(sorted(parts, key=key), key):
        group = sorted(group, key=lambda part: part.peer == "numpy")  # the slow one last
        name = group[0].dtype
        if group[0].precision != "highest":
            name += f', precision="{group[0].precision}"'
        yield name, group


def _provenance(parts, runs):
    machines = [run["about"]["machine"] for run in runs]
    lines = dict.fromkeys(  # a set that keeps the order
        f"- {machine['cpu']}, {machine['n_cpu']} CPUs; mha_fast {machine['mha_fast']} "
        f"({machine['isa']}), NumPy {machine['numpy']}, Python {machine['python']}"
        for machine in machines
    )
    versions = dict.fromkeys(
        f"{part.peer} {part.about['peer']}" for part in parts if part.peer != "numpy"
    )
    dates = sorted({run["date"] for run in runs})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    if versions:
        lines[f"- against {', '.join(versions)}"] = None
    return "\n".join([*lines, f"- {when}", ""])


def _summary(name, parts):
    """Ratios of all peers in one dtype, and what they amount to."""
    rows = {(p.peer, row.case, row.num_threads): row for p in parts for row in p.rows}
    sides = [
        (part.peer, num_threads)
        for part in parts
        if any(row.refused is None for row in part.rows)
        for num_threads in sorted({row.num_threads for row in part.rows})
    ]
    if not sides:
        return "\n".join([heading(f"Ratios in {name}", "-"), *_refusals(parts)])
    names = list(dict.fromkeys(row.case for part in parts for row in part.rows))
    titles = ["case", *(f"{peer}, {threads(n)}" for peer, n in sides)]
    body = [
        [f"``{case}``", *(_ratio_cell(rows.get((p, case, n))) for p, n in sides)] for case in names
    ]
    return "\n".join(
        [heading(f"Ratios in {name}", "-"), table(titles, body), _verdict(rows), *_refusals(parts)]
    )


def _ratio_cell(row: Measurement | None) -> str:
    if row is None or row.refused is not None:
        return NOTHING
    if is_tie(row.ratio):
        return f"{row.ratio:.2f} (tie)"
    return f"{row.ratio:.2f}" if row.ratio > 1 else f"**{row.ratio:.2f}**"


def _verdict(rows):
    timed = {key: row.ratio for key, row in rows.items() if row.refused is None}
    ties = [ratio for ratio in timed.values() if is_tie(ratio)]
    slower = {key: ratio for key, ratio in timed.items() if ratio < 1 and not is_tie(ratio)}
    text = (
        f"Of {len(timed)} ratios, ``mha_fast`` is faster in {len(timed) - len(ties) - len(slower)}, "
        f"equal within {TIE:.0%} in {len(ties)}, and slower in {len(slower)}"
    )
    listed = [
        f"``{case}`` against {peer} on {threads(n)} ({ratio:.2f})"
        for (peer, case, n), ratio in slower.items()
    ]
    return f"{text}{': ' + '; '.join(listed) if listed else ''}.\n"


def _refusals(parts):
    """Say what was not timed and why, each reason once."""
    lines = []
    for part in parts:
        cases = {}
        for row in part.rows:
            if row.refused is not None:
                cases.setdefault(row.refused, {})[row.case] = None
        for reason, found in cases.items():
            everything = all(row.refused == reason for row in part.rows)
            which = "everything" if everything else ", ".join(f"``{case}``" for case in found)
            lines.append(f"- Not timed against {part.peer}: {which} ({reason}).")
    return [*lines, ""] if lines else []


def _details(name, parts):
    """All columns, one table per peer."""
    sections = []
    for part in parts:
        timed = [row for row in part.rows if row.refused is None]
        if timed:
            has_ways = any(row.way for row in timed)
            titles = [*_without_dtype(list(columns(part.peer))), *(["way"] if has_ways else [])]
            body = [_detail_row(row, has_ways) for row in timed]
            sections += [heading(f"{part.peer}, {name}", "~"), table(titles, body)]
            sections += [f"- {line}" for line in peaks(timed)] + [""]
    return "\n".join(sections)


def _detail_row(row, has_ways):
    found = _without_dtype(cells(row))
    return [f"``{found[0]}``", *found[1:], *([row.way or NOTHING] if has_ways else [])]


def _without_dtype(row):
    return [*row[:2], *row[3:]]


def _commands(runs):
    lines = dict.fromkeys(command for run in runs for command in run["commands"])
    return "\n".join([heading("Commands", "-"), "::\n", *(f"    {line}" for line in lines), ""])
