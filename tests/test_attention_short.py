"""What short calls do differently: fewer checks, tails of tiles, rows fetched ahead."""

from dataclasses import fields

import numpy as np
import pytest
from _dtypes import DTYPES_16, assert_rounded_once, expected_widened
from _support import assert_same_bits, normal_inputs

import mha_fast
from mha_fast import _arguments
from mha_fast._options import ATTENTION

# Widths around the pairs and the vectors of 16-bit elements.
WIDTHS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 95)


def _record(query, key, value, **changed):
    return _arguments.check(query, key, value, None, False, ATTENTION, changed)


@pytest.mark.parametrize("changed", [{}, {"is_causal": True}])
def test_record_does_not_depend_on_how_a_plain_call_is_written(changed):
    query, key, value = normal_inputs(np.float32)
    quick = _record(query, key, value, **changed)
    for other in (
        _record(query.view(np.recarray), key, value, **changed),
        _record(query, np.asfortranarray(key), value.astype(">f4"), **changed),
        _record(query, key, value, window=(None, None), **changed),
    ):
        for field in fields(_arguments.Call):
            np.testing.assert_equal(getattr(other, field.name), getattr(quick, field.name))


@pytest.mark.parametrize("dtype", DTYPES_16)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("n_query", [9, 16, 37, 65])
def test_16_bits_of_any_width_are_written_where_they_belong(n_query, width, dtype, isa):
    sizes = {"n_query": n_query, "n_key": 11, "head_width": width, "value_width": width}
    narrow = [x.astype(dtype) for x in normal_inputs(np.float32, **sizes)]
    right = expected_widened(*narrow)
    room = np.full((*right.out.shape[:-1], width + 2), 7, dtype)
    _, lse = mha_fast.attention(*narrow, out=room[..., 1:-1], return_lse=True)
    assert_rounded_once((room[..., 1:-1], lse), right, dtype)
    assert (room[..., 0] == 7).all() and (room[..., -1] == 7).all()


@pytest.mark.parametrize("n_kv_head", [20, 5])
@pytest.mark.parametrize("n_query", [9, 70, 130])
def test_many_heads_give_the_bits_of_one(n_query, n_kv_head, isa):
    sizes = {"n_head": 20, "n_kv_head": n_kv_head, "n_query": n_query, "n_key": 70}
    query, key, value = normal_inputs(np.float32, batch=(8,), **sizes)
    together = mha_fast.attention(query, key, value)
    for i in range(8):
        assert_same_bits(mha_fast.attention(query[i], key[i], value[i]), together[i])
