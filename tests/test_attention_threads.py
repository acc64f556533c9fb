"""The same bits whoever computes them, and good manners towards other threads and processes."""

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _support import DTYPES, assert_same_bits, normal_inputs, run_python

import mha_fast
from mha_fast import _core

# Large enough for several tasks on every path, with uneven work and a key axis that splits.
SHAPES = {
    "tiles": {"n_query": 300, "n_key": 300},
    "few rows": {"n_query": 1, "n_key": 2600},
    "few rows, many heads": {"n_query": 1, "n_key": 40, "n_head": 64, "n_kv_head": 64},
    "small": {"n_query": 10, "n_key": 20},
}
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True, "query_offset": "end"},
    "lengths": {"kv_lengths": 19, "window": (10, None)},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_any_number_of_threads(shape, dtype, options, isa):
    inputs = normal_inputs(dtype, **SHAPES[shape])
    right, right_lse = _one_thread(*inputs, **OPTIONS[options])
    for num_threads in (1, 2, 3, 7, None):
        for _ in range(2):
            out, lse = mha_fast.attention(
                *inputs, num_threads=num_threads, return_lse=True, **OPTIONS[options]
            )
            assert_same_bits(out, right)
            assert_same_bits(lse, right_lse)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_for_any_number_of_threads_beside_nan_values(shape, dtype, isa):
    """Which rows share a task depends on the threads; a value that only some of them see may not."""
    query, key, value = normal_inputs(dtype, **SHAPES[shape])
    value[..., 17::50, :] = np.nan
    options = {"window": (5, 0), "query_offset": "end"}
    right, _ = _one_thread(query, key, value, **options)
    for num_threads in (2, 3, 7):
        out = mha_fast.attention(query, key, value, num_threads=num_threads, **options)
        assert_same_bits(out, right)


def _one_thread(*inputs, **options):
    return mha_fast.attention(*inputs, num_threads=1, return_lse=True, **options)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_same_bits_alone_and_inside_a_batch(shape, dtype, isa):
    batch = normal_inputs(dtype, **{"batch": (8,), **SHAPES[shape]})
    lengths = np.array([20, 1, 0, 13, 20, 7, 19, 20])
    out, lse = mha_fast.attention(*batch, kv_lengths=lengths, return_lse=True)
    for b in range(8):
        alone = [x[b] for x in batch]
        one, one_lse = _one_thread(*alone, kv_lengths=lengths[b])
        assert_same_bits(out[b], one)
        assert_same_bits(lse[b], one_lse)


MANY_THREADS = """
import numpy as np
import mha_fast
x = np.random.default_rng(0).standard_normal((20_000, 1, 9, 4), dtype=np.float32)
one, many = (mha_fast.attention(x, x, x, num_threads=n) for n in (1, 2**31 - 1))
print(one.tobytes() == many.tobytes())
"""


def test_more_threads_than_any_machine_has(tmp_path):
    """A runtime that cannot start so many ends the process, so this is one of its own."""
    process = run_python(MANY_THREADS, tmp_path)
    assert process.stdout == "True\n", process.stderr


def test_same_bits_alone_and_inside_a_batch_that_shares_keys(isa):
    query, key, value = normal_inputs(np.float32, batch=(8,), n_query=70)
    key, value = (np.broadcast_to(x[:1], x.shape) for x in (key, value))
    out = mha_fast.attention(query, key, value)
    for b in range(8):
        assert_same_bits(out[b], mha_fast.attention(query[b], key[0], value[0], num_threads=1))


def test_many_python_threads_at_once(isa):
    def work(seed):
        inputs = normal_inputs(np.float32, n_query=1 + 37 * (seed % 3), n_key=700, seed=seed)
        return [mha_fast.attention(*inputs, is_causal=True, num_threads=2) for _ in range(5)]

    right = [work(seed)[0] for seed in range(8)]
    with ThreadPoolExecutor(8) as pool:
        for seed, results in enumerate(pool.map(work, range(8))):
            for out in results:
                assert_same_bits(out, right[seed])


def test_other_python_threads_run_during_a_call():
    """The call lets go of the interpreter: another thread can count while it runs."""
    inputs = normal_inputs(np.float64, batch=(), n_head=4, n_query=2000, n_key=2000, head_width=64)
    counted, stop = [0], threading.Event()

    def count():
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0.0001)  # lets go by itself, or the call could never take over again

    thread = threading.Thread(target=count)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1000)  # from here on nobody is made to let go
    try:
        thread.start()
        before = counted[0]
        mha_fast.attention(*inputs, num_threads=1)
        during = counted[0] - before
    finally:
        stop.set()
        sys.setswitchinterval(switch_interval)
        thread.join()
    assert during > 0


@pytest.fixture
def restored_threads():
    before = mha_fast.get_num_threads()
    yield before
    mha_fast.set_num_threads(before)


def test_number_of_threads_is_kept(restored_threads):
    assert restored_threads >= 1
    for number in (1, 3, np.int64(2)):
        mha_fast.set_num_threads(number)
        assert mha_fast.get_num_threads() == number
    inputs = normal_inputs(np.float32)
    mha_fast.attention(*inputs, num_threads=1)
    assert mha_fast.get_num_threads() == 2


def test_number_of_threads_goes_back_to_the_default(restored_threads):
    mha_fast.set_num_threads(None)
    default = mha_fast.get_num_threads()
    mha_fast.set_num_threads(default + 1)
    mha_fast.set_num_threads(None)
    assert mha_fast.get_num_threads() == default == _core.default_threads()


@pytest.mark.parametrize(
    ("number", "error"),
    [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("2", TypeError)],
)
def test_number_of_threads_that_makes_no_sense(number, error, restored_threads):
    with pytest.raises(error, match=rf"^n is {number!r}; expected an int of at least 1$"):
        mha_fast.set_num_threads(number)
    assert mha_fast.get_num_threads() == restored_threads


FORK = """
import multiprocessing, sys
import numpy as np
import mha_fast

x = np.random.default_rng(0).standard_normal((2, 4, 300, 32), dtype=np.float32)
before = mha_fast.attention(x, x, x, num_threads=2)

def child():
    for num_threads in (None, 1, 2):
        out = mha_fast.attention(x, x, x, num_threads=num_threads)
        if out.tobytes() != before.tobytes():
            sys.exit(3)

if __name__ == "__main__":
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=child, daemon=True) for _ in range(2)]
    for process in children:
        process.start()
    for process in children:
        process.join(30)  # a guard against hanging, not a limit of time
        if process.is_alive():
            sys.exit("a child process hangs")  # and ends with this one, being a daemon
    after = mha_fast.attention(x, x, x, num_threads=2)
    print([process.exitcode for process in children], after.tobytes() == before.tobytes())
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_child_processes_after_fork(tmp_path):
    process = run_python(FORK, tmp_path, PYTHONWARNINGS="ignore::DeprecationWarning")
    assert process.stdout.split("\n")[0] == "[0, 0] True", process.stderr


def _half_of_the_smallest_normal():
    return sys.float_info.min / 2


def test_small_numbers_are_not_flushed_to_zero(isa):
    inputs = normal_inputs(np.float32, n_query=300)
    mha_fast.attention(*inputs, num_threads=2)
    assert _half_of_the_smallest_normal() != 0
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(_half_of_the_smallest_normal).result() != 0
        pool.submit(mha_fast.attention, *inputs).result()
        assert pool.submit(_half_of_the_smallest_normal).result() != 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n_query", [1, 300])
def test_kernel_itself_keeps_subnormal_values(n_query, dtype, isa):
    zeros = np.zeros((4, n_query, 3), dtype)
    keys = np.zeros((4, 2, 3), dtype)
    small = np.full((4, 2, 5), 64 * np.finfo(dtype).smallest_subnormal, dtype)
    for num_threads in (1, 2):
        out = mha_fast.attention(zeros, keys, small, num_threads=num_threads)
        assert_same_bits(out, np.broadcast_to(small[:, :1], out.shape))


OTHER_RUNTIME = """
import numpy as np
if {order!r} == "before":
    import {module}
import mha_fast
x = np.random.default_rng(0).standard_normal((2, 4, 300, 32), dtype=np.float32)
first = mha_fast.attention(x, x, x, num_threads=2)
import {module}
second = mha_fast.attention(x, x, x, num_threads=2)
print(first.tobytes() == second.tobytes(), float(np.abs(first).sum()))
"""


@pytest.mark.parametrize("module", ["torch", "sklearn.cluster"])
@pytest.mark.parametrize("order", ["before", "after"])
@pytest.mark.parametrize("bind", ["TRUE", "FALSE"])
def test_beside_another_openmp_runtime(module, order, bind, tmp_path):
    pytest.importorskip(module)
    code = OTHER_RUNTIME.format(order=order, module=module)
    process = run_python(code, tmp_path, OMP_PROC_BIND=bind)
    alone = run_python(OTHER_RUNTIME.format(order="after", module="json"), tmp_path)
    assert process.stdout.startswith("True "), process.stderr
    assert process.stdout == alone.stdout
