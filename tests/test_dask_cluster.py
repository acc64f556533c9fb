"""`mha_fast.dask` on worker processes of `distributed`: one is killed, memory is bounded."""

import os
import signal
import time

import numpy as np
import pytest
from _dask_chunks import KillsItsWorker, fails, numbers
from _support import assert_same_bits

dask = pytest.importorskip("dask")
da = pytest.importorskip("dask.array")
distributed = pytest.importorskip("distributed")

import mha_fast
import mha_fast.dask
from mha_fast.integrations.dask import _threads

# Sockets and event loops of a cluster that ends with its workers killed are not all closed.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

N_WORKER = 2


@pytest.fixture(scope="module")
def client():
    cluster = distributed.LocalCluster(
        n_workers=N_WORKER, threads_per_worker=1, dashboard_address=None, processes=True
    )
    with cluster, distributed.Client(cluster) as client:
        yield client


def lazy(heads=(2, 2), rows=(128,) * 12, width=16, function=numbers, dtype=np.float32):
    return da.map_blocks(
        function,
        chunks=((1, 1), heads, rows, (width,)),
        dtype=dtype,
        meta=np.empty((0,) * 4, dtype),
    )


def on_one_thread(*arrays):
    return dask.compute(*arrays, scheduler="synchronous")


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_workers_give_the_bits_of_one_thread(client, dtype):
    dtype = pytest.importorskip("ml_dtypes").bfloat16 if dtype == "bfloat16" else np.dtype(dtype)
    query, key, value = (lazy(rows=(100,) * 4).astype(dtype) for _ in range(3))
    key = key[:, ::-1]
    results = mha_fast.dask.attention(
        query, key, value, is_causal=True, return_lse=True, sinks=np.arange(4.0),
        alibi_slopes=np.arange(4) / 4,
    )  # fmt: skip
    for x, right in zip(dask.compute(*results), on_one_thread(*results), strict=True):
        assert_same_bits(x, right)


def test_threads_of_all_workers_share_the_cores(client):
    asked = client.submit(_threads.threads_per_task, pure=False).result()
    assert asked == max(_threads.CPU_COUNT // N_WORKER, 1)


def test_result_is_the_same_when_a_worker_is_killed_by_its_task(client, tmp_path):
    """The worker dies while it makes a chunk of keys in the middle of the run."""
    marker = tmp_path / "killed"
    keys = lazy(function=KillsItsWorker(marker, (1, 1, 7, 0)))
    query, value = lazy(), lazy()
    out = mha_fast.dask.attention(query, keys, value, is_causal=True, query_offset="end")
    found = out.compute()
    assert marker.exists()
    assert_same_bits(found, on_one_thread(out)[0])


def test_result_is_the_same_when_a_worker_is_killed_from_outside(client):
    """It dies when parts are in its memory, which then have to be computed again."""
    client.wait_for_workers(N_WORKER)
    query, key, value = (lazy(rows=(256,) * 14) for _ in range(3))
    out = mha_fast.dask.attention(query, key, value, return_lse=True)[0]
    future = client.compute(out)
    process_ids = client.run(os.getpid)
    victim = _worker_with_parts(client, future)
    os.kill(process_ids[victim], signal.SIGKILL)
    found = future.result()
    assert victim not in client.scheduler_info(n_workers=-1)["workers"]
    assert_same_bits(found, on_one_thread(out)[0])


def _worker_with_parts(client, future):
    """Wait until a worker holds results of kernel calls, and more are to come."""
    while not future.done():
        for worker, keys in client.has_what().items():
            if sum("attention-part" in str(key) for key in keys) >= 2:
                return worker
        time.sleep(0.01)
    raise AssertionError("the run was over before a part was seen")


def test_failure_on_a_worker_names_the_chunk(client):
    x = lazy(rows=(50,) * 4)
    out = mha_fast.dask.attention(x, lazy(rows=(50,) * 4, function=fails), x)
    with pytest.raises(ValueError, match="key has shape .*expected head width 16") as caught:
        out.compute()
    (note,) = (note for note in caught.value.__notes__ if "chunk" in note)
    assert note.startswith("in attention of the chunk with batch axis 0 ")
    assert note.endswith("keys 150:200")
