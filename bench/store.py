"""What was measured for the results page, in ``bench/results/``: one small file per part.

A part is one peer in one dtype and precision. A later run of the same part replaces the cases that
it measured and keeps the others, unless machine or versions have changed: then the others go.
"""

import json
import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from .cases import CASES
from .measure import Measurement

RESULTS = Path(__file__).with_name("results")
SCALING = "scaling.json"

_N_DIGIT = 5  # significant ones; the noise of a time is in the third


@dataclass(frozen=True)
class Part:
    """Some rows that belong together, and how they came about."""

    about: dict  # the machine, and the version of the peer
    date: str
    commands: list[str]
    peer: str
    dtype: str
    precision: str
    quick: bool  # too short to quote
    rows: list[Measurement] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Name of its file, without the ending."""
        suffix = "" if self.precision == "highest" else f"_{self.precision}"
        return f"{self.peer}_{self.dtype}{suffix}"


def read_parts(folder: Path) -> list[Part]:
    """Read all parts that are there, in the order of their names."""
    paths = sorted(path for path in folder.glob("*.json") if path.name != SCALING)
    return [_read_part(path) for path in paths]


def add_part(part: Part, folder: Path) -> None:
    """Write `part`, with what is still good of its file."""
    path = folder / f"{part.name}.json"
    rows = {(row.case, row.num_threads): row for row in part.rows}
    commands = part.commands
    if path.exists():
        old = _read_part(path)
        if (old.about, old.quick) == (part.about, part.quick):
            rows = {(row.case, row.num_threads): row for row in old.rows} | rows
            commands = list(dict.fromkeys([*old.commands, *commands]))
    content = asdict(part) | {"commands": commands}
    content["rows"] = [_compact(row) for row in sorted(rows.values(), key=_place)]
    write(content, "rows", path)


def _place(row):
    order = list(CASES)
    return order.index(row.case) if row.case in CASES else len(order), row.case, row.num_threads


def read(path: Path) -> dict | None:
    """Read one file, None where there is none."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def _read_part(path):
    content = read(path)
    rows = [Measurement(**row) for row in content.pop("rows")]
    return Part(**content, rows=rows)


def _compact(row):
    """The fields of a row that say something."""
    content = {f.name: getattr(row, f.name) for f in fields(row)}
    defaults = {f.name: f.default for f in fields(row)}
    return {
        name: value
        for name, value in content.items()
        if value not in (defaults[name], []) and not _is_nan(value)
    }


def _is_nan(value):
    return isinstance(value, float) and math.isnan(value)


def write(content: dict, list_name: str, path: Path) -> None:
    """Write JSON whose list of that name has one element per line, so that a diff can be read."""
    content = _rounded(content)
    elements = ",\n".join(f"  {json.dumps(element)}" for element in content.pop(list_name))
    head = json.dumps(content, indent=1).removesuffix("\n}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head},\n "{list_name}": [\n{elements}\n ]\n}}\n', encoding="utf-8")


def _rounded(content):
    match content:
        case float():
            return float(f"{content:.{_N_DIGIT}g}")
        case dict():
            return {name: _rounded(value) for name, value in content.items()}
        case list() | tuple():
            return [_rounded(value) for value in content]
        case _:
            return content
