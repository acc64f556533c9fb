"""How many threads a kernel call inside a task may use: the cores that other tasks leave to it.

Results do not depend on it, so that a wrong guess costs time and nothing else.
"""

import multiprocessing
import sys
import threading
import time
from typing import Any

import dask
import dask.threaded
from dask.system import CPU_COUNT

# How long the answer of distributed's scheduler is taken for true: workers come and go.
_FRESH_SECONDS = 10.0
_of_worker: dict[str, tuple[float, int]] = {}  # worker's address -> (when asked, threads)


def threads_per_task() -> int:
    """Return the cores of this machine over the tasks that run on it at a time, at least 1."""
    worker = _distributed_worker()
    if worker is not None:
        return _threads_beside(worker)
    return max(CPU_COUNT // _local_tasks(), 1)


def _local_tasks() -> int:
    """Return how many tasks dask's own schedulers run at a time in and around this process."""
    if multiprocessing.parent_process() is not None:  # scheduler="processes"
        return int(dask.config.get("num_workers", None) or CPU_COUNT)
    name_of_pool = threading.current_thread().name.rsplit("_", 1)[0]
    pools = [dask.threaded.default_pool]
    for by_size in list(dask.threaded.pools.values()):
        pools += by_size.values()
    for pool in pools:
        # The executors of the standard library name their threads so; what other attribute they
        # have is set after a thread has started.
        if name_of_pool == getattr(pool, "_thread_name_prefix", None):
            return int(pool._max_workers)
    return 1  # scheduler="synchronous", or a call outside of dask


def _distributed_worker() -> Any:
    """Return the worker whose task this is, if distributed runs it."""
    distributed = sys.modules.get("distributed")
    if distributed is None:
        return None
    try:
        return distributed.get_worker()
    except ValueError:  # its way to say that there is none
        return None


def _threads_beside(worker: Any) -> int:
    """Return the cores over the threads of all workers on this machine."""
    now = time.monotonic()
    asked, n_thread = _of_worker.get(worker.address, (-_FRESH_SECONDS, 0))
    if now - asked >= _FRESH_SECONDS:
        n_thread = max(CPU_COUNT // max(_tasks_on_host(worker), 1), 1)
        _of_worker[worker.address] = now, n_thread
    return n_thread


def _tasks_on_host(worker: Any) -> int:
    """Return the threads of all workers with this one's host, as the scheduler knows them."""
    from distributed.utils import sync

    known = sync(worker.loop, worker.scheduler.identity)["workers"].values()
    host = worker.address.split("://")[-1].rsplit(":", 1)[0]
    return sum(other["nthreads"] for other in known if other["host"] == host) or int(
        worker.state.nthreads
    )
