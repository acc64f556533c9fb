"""What `import mha_fast` does in a checkout: its folder has the sources, but no compiled core."""

import filecmp
import sys
from collections.abc import Iterable, Iterator
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

_DEVELOP = "install the tree for development with: pip install -e ."


def with_core(path: Iterable[str], error: ImportError) -> list[str]:
    """Where the modules of the package are to be found, when they have no core beside them.

    That is the installed package, as long as its Python files are those of the tree, so that
    nothing runs but what can be read here.

    Parameters
    ----------
    path : iterable of str
        ``__path__`` of the package.
    error : ImportError
        What the import of the core raised.

    Returns
    -------
    list of str

    Raises
    ------
    ImportError
        `error`, where this is no source tree; else one that says what to do.
    """
    here = Path(next(iter(path)))
    if not (here.parent / "CMakeLists.txt").exists():
        raise error
    for installed in _others(here):
        different = next(_differences(here, installed), None)
        if different is None:
            return [str(installed)]
        raise ImportError(
            f"This is the source tree of mha_fast, and {different} is not the file that is "
            f"installed in {installed}. Install it again with: pip install . Or {_DEVELOP}"
        ) from error
    raise ImportError(
        "This is the source tree of mha_fast, whose compiled core is not in it. Install it with: "
        f"pip install . Or {_DEVELOP}"
    ) from error


def _others(here: Path) -> Iterator[Path]:
    """Folders of the same name that have a core, first those that Python would find first."""
    for entry in sys.path:
        folder = Path(entry or ".").resolve() / here.name
        if folder != here.resolve() and any(
            (folder / f"_core{suffix}").exists() for suffix in EXTENSION_SUFFIXES
        ):
            yield folder


def _differences(tree: Path, installed: Path) -> Iterator[Path]:
    """Python files that are not the same in both."""
    files = {x.relative_to(folder) for folder in (tree, installed) for x in folder.rglob("*.py")}
    for file in sorted(files):
        mine, theirs = tree / file, installed / file
        if not (mine.exists() and theirs.exists() and filecmp.cmp(mine, theirs, shallow=False)):
            yield file
