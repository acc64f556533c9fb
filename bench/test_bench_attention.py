"""mha_fast and the NumPy baseline side by side, one pytest-benchmark group per case.

Each pair is timed three times over, contender after contender, so that a change of the clock or
a busy neighbour between two timings does not decide the ratio of the two; ``bench.guard`` takes
the median of the three.
"""

from functools import lru_cache

import pytest

import mha_fast
from mha_fast.reference import naive_attention

from .accuracy import expected_rows
from .cases import CASES, GUARDED, make_inputs


def _fused(inputs, case):
    return mha_fast.attention(*inputs, is_causal=case.is_causal)


def _naive(inputs, case):
    return naive_attention(*inputs, is_causal=case.is_causal)


CONTENDERS = {"mha_fast": _fused, "numpy": _naive}


@lru_cache(maxsize=1)  # the tests of one case follow each other
def _prepared(name):
    case = CASES[name]
    inputs = make_inputs(case)
    return case, inputs, expected_rows(case, inputs)


@pytest.mark.parametrize("contender", CONTENDERS)  # the uppermost varies fastest
@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("name", GUARDED)
def test_attention(benchmark, name, repeat, contender):
    case, inputs, expected = _prepared(name)
    attend = CONTENDERS[contender]
    expected.error_of(attend(inputs, case))

    benchmark.group = f"{name} ({case.shape})"
    benchmark.extra_info.update(case=name, contender=contender, repeat=repeat)
    benchmark(attend, inputs, case)

    if benchmark.stats is not None:  # None under --benchmark-disable
        seconds = benchmark.stats.stats.min
        benchmark.extra_info["GFLOP/s"] = round(case.n_flop / seconds / 1e9, 2)
        benchmark.extra_info["GB/s"] = round(case.n_bytes / seconds / 1e9, 2)
