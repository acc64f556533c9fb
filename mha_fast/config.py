"""Threads, the instruction set, and what this build is."""

import os
import sys
from typing import Any

import numpy as np

from . import _core, _cpus
from ._checks import positive_int

_n_thread: int | None = None


def get_num_threads() -> int:
    """Return the number of threads that a call uses at most.

    Returns
    -------
    int
        What `set_num_threads` was given last; before that ``OMP_NUM_THREADS``, or what the OpenMP
        runtime says, but no more than the CPUs this process may run on and the CPU time that its
        control group may use. 1 in a child of `os.fork`, see the page on threads.
    """
    if _n_thread is None or _core.is_forked():
        return _core.default_threads()
    return _n_thread


def threads_asked_for() -> int:
    """Return what `set_num_threads` was given last, 0 for nothing: then the kernel decides."""
    return _n_thread or 0


def set_num_threads(n: int | None) -> None:
    """Set the number of threads that a call uses at most, for the whole process.

    Parameters
    ----------
    n : int or None
        At least 1. None goes back to the default. Results do not depend on it.

    Raises
    ------
    TypeError
        `n` is not an int.
    ValueError
        `n` is below 1.
    """
    global _n_thread
    _n_thread = None if n is None else positive_int("n", n)


def config_info() -> dict[str, Any]:
    """Return what `show_config` prints.

    Returns
    -------
    dict
        ``version``, ``python``, ``numpy`` (versions), ``cpu`` (its name), ``isa`` (in use), ``isas_available``, ``isas_built``, ``matrix_unit_emulated``
        (whether "amx" is software in this build), ``openmp`` (whether the build has threads),
        ``num_threads``, ``openmp_runtimes`` (paths of those loaded in this process, from any
        package; empty where the operating system does not tell).
    """
    from . import __version__

    return {
        "version": __version__,
        "python": sys.version.split()[0],
        "numpy": np.__version__,
        "cpu": _cpus.name(),
        "isa": _core.isa(),
        "isas_available": _core.available_isas(),
        "isas_built": _core.built_isas(),
        "matrix_unit_emulated": _core.emulates_matrix_unit(),
        "openmp": _core.has_openmp(),
        "num_threads": get_num_threads(),
        "openmp_runtimes": _cpus.openmp_runtimes(),
    }


def show_config() -> dict[str, Any]:
    """Print versions, CPU, instruction sets, threads and the OpenMP runtimes loaded.

    More than one runtime (another package brought its own) means more than one pool of threads;
    results do not change.

    Returns
    -------
    dict
        The same facts: ``version``, ``python``, ``numpy``, ``cpu`` (its name), ``isa`` (in use),
        ``isas_available``, ``isas_built``, ``matrix_unit_emulated``, ``openmp`` (whether the build
        has threads), ``num_threads``, ``openmp_runtimes`` (their paths).
    """
    info = config_info()
    forced = os.environ.get("MHA_FAST_ISA")
    emulated = " (amx emulated)" if info["matrix_unit_emulated"] else ""
    lines = {
        "mha_fast": info["version"],
        "Python": info["python"],
        "NumPy": info["numpy"],
        "CPU": info["cpu"],
        "instruction set": info["isa"] + (" (MHA_FAST_ISA)" if forced else ""),
        "  available": ", ".join(info["isas_available"]),
        "  in this build": ", ".join(info["isas_built"]) + emulated,
        "threads": str(info["num_threads"]) + ("" if info["openmp"] else " (built without OpenMP)"),
        "OpenMP runtimes": "\n".join(info["openmp_runtimes"]) or "none found",
    }
    for name, text in lines.items():
        print(f"{name:<18}" + text.replace("\n", "\n" + " " * 18))
    return info


def choose_isa() -> None:
    """Use the instruction set that the environment variable MHA_FAST_ISA names, if it is set."""
    name = os.environ.get("MHA_FAST_ISA")
    if name:
        try:
            _core.use_isa(name)
        except ValueError as error:
            raise ImportError(f"environment variable MHA_FAST_ISA={name}: {error}") from None
