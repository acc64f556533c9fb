"""A long call answers signals in the middle, and leaves nothing broken."""

import contextlib
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from _support import run_python

import mha_fast

pytestmark = pytest.mark.skipif(
    not hasattr(signal, "setitimer"), reason="this system has no interval timers"
)


class Interrupted(Exception):
    """What the handler raises."""


@contextlib.contextmanager
def alarm_after(seconds, handler):
    """Run the handler so many seconds from now."""
    before = signal.signal(signal.SIGALRM, handler)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def raise_interrupted(*_):
    raise Interrupted


def long_inputs(n_query=40_000, n_key=40_000):
    """Some seconds of work on any machine, in hundreds of tasks."""
    rng = np.random.default_rng(0)
    query = rng.standard_normal((1, n_query, 64), dtype=np.float32)
    key = rng.standard_normal((1, n_key, 64), dtype=np.float32)
    return query, key, key


ENTRIES = {
    "attention": lambda inputs, **options: mha_fast.attention(*inputs, **options),
    "attention_varlen": lambda inputs, out, **options: mha_fast.attention_varlen(
        *(x.swapaxes(0, 1) for x in inputs),
        [0, inputs[0].shape[1]],
        [0, inputs[1].shape[1]],
        out=out.swapaxes(0, 1),
        **options,
    ),
}


@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize("entry", ENTRIES)
def test_handler_that_raises_stops_the_call(entry, num_threads):
    inputs = long_inputs()
    out = np.full_like(inputs[0], np.nan)
    with alarm_after(0.1, raise_interrupted), pytest.raises(Interrupted):
        ENTRIES[entry](inputs, out=out, num_threads=num_threads)
    assert np.isnan(out).all(-1).any()  # some rows were never reached
    _still_works(num_threads)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_statistics_stop_too(num_threads):
    query, key, _ = long_inputs()
    with alarm_after(0.1, raise_interrupted), pytest.raises(Interrupted):
        mha_fast.head_statistics(query, key, received=True, num_threads=num_threads)
    _still_works(num_threads)


def _still_works(num_threads):
    x = np.random.default_rng(1).standard_normal((4, 500, 64), dtype=np.float32)
    right = mha_fast.attention(x, x, x, num_threads=1)
    assert mha_fast.attention(x, x, x, num_threads=num_threads).tobytes() == right.tobytes()


def test_handler_that_returns_changes_nothing():
    """It may even call us, while the team waits."""
    x = np.random.default_rng(1).standard_normal((2, 500, 64), dtype=np.float32)
    small = mha_fast.attention(x, x, x)
    query, key, value = long_inputs(n_query=12_000)
    right = mha_fast.attention(query, key, value)
    seen = []

    def handler(*_):
        seen.append(mha_fast.attention(x, x, x).tobytes() == small.tobytes())

    with alarm_after(0.05, handler):
        out = mha_fast.attention(query, key, value)
    assert seen == [True]
    assert out.tobytes() == right.tobytes()


def test_calls_of_other_threads_go_on():
    """Signals are the main thread's: a call elsewhere is neither stopped nor told."""
    inputs = long_inputs(n_query=8000)
    right = mha_fast.attention(*inputs)
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(mha_fast.attention, *inputs)
        with alarm_after(0.1, raise_interrupted), pytest.raises(Interrupted):
            mha_fast.attention(*long_inputs())
        assert elsewhere.result().tobytes() == right.tobytes()


CTRL_C = """
import os, signal, sys, threading, time
import numpy as np
import mha_fast
x = np.ones((1, 60_000, 64), np.float32)
out = np.full_like(x, np.nan)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    mha_fast.attention(x, x, x, out=out)
except KeyboardInterrupt:
    print("interrupted", np.isnan(out).any())
mha_fast.attention(x[:, :1000], x, x, out=out[:, :1000])
print((out[:, :1000] == 1).all())
"""


def test_ctrl_c_in_a_program(tmp_path):
    process = run_python(CTRL_C, tmp_path)
    assert process.stdout == "interrupted True\nTrue\n", process.stderr


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_stopped_calls_leave_no_memory_behind():
    inputs = long_inputs()

    def stop_one():
        with alarm_after(0.06, raise_interrupted), contextlib.suppress(Interrupted):
            mha_fast.attention(*inputs, out=out)

    def resident():
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")

    out = np.empty_like(inputs[0])
    for _ in range(5):
        stop_one()
    before = resident()
    for _ in range(20):
        stop_one()
    assert resident() - before < 4 << 20
