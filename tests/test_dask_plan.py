"""bench/dask_plan.py: the simulation against sums by hand, and the page that quotes it."""

import pytest
from _bench import ROOT

from bench import dask_plan
from mha_fast.cost import chunk_cost

PAGE = ROOT / "docs" / "longer_than_one_machine.rst"


def plan(**changes):
    sizes = {"machines": 4, "tokens": 4000, "gmadds": 1.0, "gbytes": 1e9, "latency": 0.0}
    return dask_plan.Plan(**(sizes | {"is_causal": False} | changes))


def test_without_a_network_all_orders_take_the_time_of_the_arithmetic():
    arithmetic = 4000**2 * 128 / 4 / 1e9
    for order in (dask_plan.ring, dask_plan.tree, dask_plan.dask):
        assert order(plan()).seconds == pytest.approx(arithmetic)


def test_a_causal_limit_in_stripes_leaves_half():
    assert dask_plan.ring(plan(is_causal=True)).seconds == pytest.approx(
        dask_plan.ring(plan()).seconds / 2, rel=1e-3
    )


def test_a_slow_network_decides():
    share = chunk_cost(1000, 1000, 64)
    kv = share.key_bytes + share.value_bytes
    slow = plan(gmadds=1e9, gbytes=1e-3)
    ring, tree = dask_plan.ring(slow), dask_plan.tree(slow)
    assert ring.bytes_in == 3 * kv
    assert ring.seconds == pytest.approx(3 * kv / 1e6, rel=1e-3)
    assert tree.bytes_in == 3 * share.query_bytes + 3 * share.part_bytes
    assert tree.seconds == pytest.approx(tree.bytes_in / 1e6, rel=1e-3)


def test_dask_is_bounded_by_every_chunk_and_every_part():
    small = chunk_cost(500, 500, 64)
    outcome = dask_plan.dask(plan(chunk=500))
    assert outcome.bytes_in == 6 * small.input_bytes + 12 * small.part_bytes


def test_one_machine_sends_nothing():
    for order in (dask_plan.ring, dask_plan.tree, dask_plan.dask):
        assert order(plan(machines=1)).bytes_in == 0


@pytest.mark.parametrize("arguments", [[], ["--gbytes", "0.125"]], ids=["10 Gbit", "1 Gbit"])
def test_the_page_shows_what_the_command_prints(arguments, capsys):
    dask_plan.main(arguments)
    shown = [line.strip() for line in PAGE.read_text(encoding="utf-8").splitlines()]
    for line in capsys.readouterr().out.splitlines():
        assert line.strip() in shown
