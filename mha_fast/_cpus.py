"""Which CPUs this process may use: by its control group, and before another runtime bound it."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager


def cpu_quota(proc: str = "/proc/self/cgroup", mounts: str = "/sys/fs/cgroup") -> int | None:
    """CPUs' worth of time that the control groups of this process allow, rounded up; None: any.

    Both versions of Linux' control groups. A group is bounded by those around it; inside a
    container the path of the own group may not exist, that of the outermost one does.
    """
    quotas = []
    for line in _read(proc).splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers == "":
            folders = [mounts, f"{mounts}/unified"]
        elif "cpu" in controllers.split(","):
            folders = [f"{mounts}/cpu", f"{mounts}/{controllers}"]
        else:
            continue
        for folder in folders:
            quotas += [q for group in _with_parents(path) if (q := _quota_of(folder + group))]
    return max(math.ceil(min(quotas)), 1) if quotas else None


def _with_parents(path: str) -> Iterator[str]:
    while path.strip("/"):
        yield path
        path = path.rpartition("/")[0]
    yield ""


def _quota_of(group: str) -> float | None:
    """CPUs that one group allows by itself."""
    numbers = _read(f"{group}/cpu.max").split()
    if not numbers:
        numbers = [*_read(f"{group}/cpu.cfs_quota_us").split(), "-1", ""][:1]
        numbers += _read(f"{group}/cpu.cfs_period_us").split()
    try:
        quota, period = (float(number) for number in numbers)
    except ValueError:  # "max", or no such files
        return None
    return quota / period if quota > 0 and period > 0 else None


def _read(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError:
        return ""


def name() -> str:
    """What the CPU calls itself."""
    for line in _read("/proc/cpuinfo").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == "model name":
            return value.strip()
    import platform

    return platform.processor() or platform.machine()


def openmp_runtimes() -> list[str]:
    """Paths of the OpenMP runtimes loaded in this process, from any package."""
    import re

    return sorted(set(re.findall(r"/\S*/lib(?:gomp|omp|iomp5)[-.]\S*", _read("/proc/self/maps"))))


@contextmanager
def unbound() -> Iterator[None]:
    """Let an OpenMP runtime that is loaded here see the CPUs that others saw before it.

    With OMP_PROC_BIND the first runtime of a process binds the main thread to one place, and one
    loaded later (each package may bring its own) takes this place for all there is. The first
    one still knows them.
    """
    bind = os.environ.get("OMP_PROC_BIND", "").strip().lower()
    if bind in ("", "false") or not hasattr(os, "sched_getaffinity"):
        yield
        return
    now = os.sched_getaffinity(0)
    before = now.union(*map(_places_of, openmp_runtimes()))
    if before == now:
        yield
        return
    os.sched_setaffinity(0, before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, now)


def _places_of(runtime: str) -> set[int]:
    """CPUs of all places of a runtime that is loaded; none if it cannot say."""
    import ctypes

    try:
        library = ctypes.CDLL(runtime)
        counts = [library.omp_get_place_num_procs(i) for i in range(library.omp_get_num_places())]
        cpus: set[int] = set()
        for place, count in enumerate(counts):
            ids = (ctypes.c_int * count)()
            library.omp_get_place_proc_ids(place, ids)
            cpus.update(ids)
    except (OSError, AttributeError):
        return set()
    return cpus
