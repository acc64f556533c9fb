"""attention_backward() against the formulas in float64, and the faults that others have shipped."""

import numpy as np
import pytest
from _backward import (
    ALL_OPTIONS,
    assert_gradients_correct,
    backward,
    random_grads,
    without_threads,
)
from _dtypes import DTYPES_16
from _gradients import (
    assert_close_to_largest,
    differentiable,
    directional_difference,
    torch_gradients,
    weighted_sum,
)
from _options import OPTIONS, arguments_of
from _support import DTYPES, assert_same_bits, normal_inputs, using_isa

import mha_fast
from mha_fast import reference

SIZES = {"n_query": 37, "n_key": 150}
WITH_MASK = ("query", "key", "value", "attn_mask")


def call_with(names, dtype=np.float64, **sizes):
    """Arguments of attention(), with the named options."""
    sizes = SIZES | sizes
    call = dict(zip(("query", "key", "value"), normal_inputs(dtype, **sizes), strict=True))
    return call | arguments_of(names, np.float64, sizes["n_query"], sizes["n_key"])


# ---- the right numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_each_option_alone(name, isa):
    assert_gradients_correct(call_with([name]), with_grad_lse=True)


@pytest.mark.parametrize("dtype", [*DTYPES, *DTYPES_16])
def test_all_options_together(dtype, isa):
    call = call_with(ALL_OPTIONS, dtype) | {"dropout_p": 0.3, "dropout_seed": 2**64 - 3}
    assert_gradients_correct(call, with_grad_lse=True)


# Around a vector, a sub-tile, a key block and a chunk, of any instruction set.
@pytest.mark.parametrize("n_key", [1, 5, 64, 65, 257])
@pytest.mark.parametrize("n_query", [1, 3, 24, 33, 64, 130, 265])
def test_sizes_around_tiles_and_chunks(n_query, n_key, isa):
    assert_gradients_correct(call_with([], n_query=n_query, n_key=n_key, batch=(), n_head=2))


@pytest.mark.parametrize("widths", [(1, 1), (8, 16), (16, 64), (33, 7), (96, 128), (0, 5), (5, 0)])
@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_widths_of_keys_and_values(widths, dtype, isa):
    """The width of the values differs from that of the keys, and neither need fill a vector."""
    call = call_with([], dtype, batch=(), head_width=widths[0], value_width=widths[1])
    assert_gradients_correct(call, with_grad_lse=True)


def test_finite_differences_of_the_kernel(isa):
    call = without_threads(call_with(ALL_OPTIONS)) | {"dropout_p": 0.3, "dropout_seed": 7}
    grad_out, grad_lse = random_grads(call)
    wanted = differentiable(call)
    found = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted)

    for name, grad in zip(wanted, found, strict=True):
        x = np.asarray(call[name])
        direction = np.random.default_rng(3).standard_normal(x.shape)
        direction = np.where(np.isfinite(x), direction, 0.0)

        def along(moved, name=name):
            return weighted_sum(mha_fast.attention, call | {name: moved}, grad_out, grad_lse)

        right = directional_difference(along, x, direction)
        unit = np.sqrt((grad**2).sum() * (direction**2).sum())
        assert abs((grad * direction).sum() - right) <= 1e-7 * unit, name


@pytest.mark.parametrize("name", ["causal", "float mask", "alibi", "softcap", "sinks", "head mask"])
def test_torch_agrees(name):
    torch = pytest.importorskip("torch", reason="compares with torch's autograd")
    call = call_with([name])
    grad_out, grad_lse = random_grads(call)
    wanted = differentiable(call)

    found = backward(call, grad_out, grad_lse=grad_lse, wanted=wanted)

    right = torch_gradients(torch, grad_out, call, grad_lse, wanted)
    for grad, right_grad in zip(found, right, strict=True):
        assert_close_to_largest(grad, right_grad, 1e-12)


@pytest.mark.parametrize("name", ["query", "key", "value"])
def test_what_is_wanted_does_not_change_it(name, isa):
    call = call_with(["causal"], n_query=300, n_key=280)
    grad_out, _ = random_grads(call)
    together = dict(zip(("query", "key", "value"), backward(call, grad_out), strict=True))

    (alone,) = backward(call, grad_out, wanted=[name])

    assert_same_bits(alone, together[name])


def test_parts_of_the_keys_take_the_lse_of_all(isa):
    call = call_with([])
    grad_out, _ = random_grads(call)
    right = backward(call, grad_out)
    out, lse = mha_fast.attention(**call, return_lse=True)
    first, second = (
        mha_fast.attention_backward(
            grad_out,
            call["query"],
            call["key"][..., part, :],
            call["value"][..., part, :],
            out,
            lse,
        )
        for part in (slice(0, 60), slice(60, None))
    )

    assert_close_to_largest(first[0] + second[0], right[0], 1e-12)
    for i in (1, 2):
        assert_close_to_largest(np.concatenate([first[i], second[i]], axis=-2), right[i], 1e-12)


# ---- what goes wrong elsewhere ------------------------------------------------------------------


def leave_garbage():
    """Let the memory that the next call gets hold numbers of another one, NaN among them."""
    call = call_with([], np.float32, n_query=600, n_key=600)
    call["key"][..., 5, :] = np.nan
    backward(call, np.ones((2, 4, 600, 12), np.float32))


def test_keys_without_a_query_get_0(isa):
    leave_garbage()
    call = call_with(["causal"], np.float32, n_query=20, n_key=700)
    _, grad_key, grad_value = backward(call, random_grads(call)[0])

    assert not grad_key[..., 20:, :].any()
    assert not grad_value[..., 20:, :].any()
    assert grad_key[..., :20, :].all() and grad_value[..., :20, :].all()


def test_queries_without_a_key_get_0(isa):
    leave_garbage()
    call = call_with(["causal"], np.float32, n_query=700, n_key=20) | {"query_offset": -300}
    call["query"][..., :300, :] = np.nan
    grad_out, _ = random_grads(call)
    grad_out[..., :300, :] = np.nan
    grad_query, grad_key, grad_value = backward(call, grad_out)

    assert not grad_query[..., :300, :].any()
    assert np.isfinite(grad_key).all() and np.isfinite(grad_value).all()
    assert grad_query[..., 301:, :].all()


@pytest.mark.parametrize(
    "empty", ["batch", "n_head", "n_query", "n_key", "head_width", "value_width"]
)
def test_empty_inputs(empty, isa):
    leave_garbage()
    sizes = {empty: (0,)} if empty == "batch" else {empty: 0}
    if empty == "n_head":
        sizes["n_kv_head"] = 0
    query, key, value = normal_inputs(np.float32, **SIZES | sizes)
    sinks = np.ones(query.shape[1], np.float32)
    call = {"query": query, "key": key, "value": value, "sinks": sinks}
    out, lse = mha_fast.attention(**call, return_lse=True)
    wanted = ("query", "key", "value", "sinks")
    found = mha_fast.attention_backward(
        np.ones_like(out), query, key, value, out, lse,
        sinks=sinks, grad_lse=np.ones_like(lse), wanted=wanted,
    )  # fmt: skip
    right = reference.attention_backward(
        np.ones_like(out), query, key, value, out, lse,
        sinks=sinks, grad_lse=np.ones_like(lse), wanted=wanted,
    )  # fmt: skip
    for name, grad, right_grad in zip(wanted, found, right, strict=True):
        assert grad.shape == call[name].shape
        np.testing.assert_allclose(grad, right_grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("with_grad_lse", [False, True])
def test_sinks_also_through_lse(with_grad_lse, isa):
    call = call_with(["sinks", "window"])
    assert_gradients_correct(call, with_grad_lse=with_grad_lse, wanted=("sinks",))


MASK_SHAPES = [(), (150,), (37, 1), (37, 150), (4, 1, 150), (1, 4, 37, 1), (2, 1, 1, 1),
               (2, 4, 37, 150), (2, 1, 37, 150)]  # fmt: skip


@pytest.mark.parametrize("shape", MASK_SHAPES, ids=str)
def test_mask_alone_is_wanted(shape, isa):
    rng = np.random.default_rng(0)
    mask = np.asarray(rng.standard_normal(shape))
    call = call_with(["causal", "lengths"]) | {"attn_mask": mask}
    grad_out, grad_lse = random_grads(call)
    (found,) = backward(call, grad_out, grad_lse=grad_lse, wanted=("attn_mask",))
    (right,) = backward(call, grad_out, grad_lse=grad_lse, wanted=("attn_mask",), of=reference)
    assert_close_to_largest(found, right, 1e-12)


@pytest.mark.parametrize("mask_dtype", [np.float64, np.float32, *DTYPES_16])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gradient_of_a_mask_has_its_dtype(dtype, mask_dtype, isa):
    mask = np.random.default_rng(0).standard_normal((37, 150)).astype(mask_dtype)
    call = call_with([], dtype) | {"attn_mask": mask}
    grad_out, _ = random_grads(call)
    (found,) = backward(call, grad_out, wanted=("attn_mask",))
    (right,) = backward(call, grad_out, wanted=("attn_mask",), of=reference)

    assert found.dtype == mask_dtype
    eps = max(float(_finfo(mask_dtype).eps), 20 * np.finfo(dtype).eps)
    assert np.abs(found.astype(np.float64) - right).max() <= eps * np.abs(right).max()


def _finfo(dtype):
    return (
        np.finfo(dtype)
        if np.dtype(dtype).kind == "f"
        else pytest.importorskip("ml_dtypes").finfo(dtype)
    )


@pytest.mark.parametrize("n_query", [37, 300])
@pytest.mark.parametrize(
    "batches",
    [((3,), (1,), (3,)), ((1,), (3,), ()), ((2, 1), (1, 3), (3,)), ((), (2, 3), (2, 1))],
    ids=str,
)
def test_broadcast_operands(batches, n_query, isa):
    rng = np.random.default_rng(1)
    query, key, value = (
        rng.standard_normal((*batch, *rows))
        for batch, rows in zip(batches, [(4, n_query, 5), (2, 70, 5), (2, 70, 3)], strict=True)
    )
    assert_gradients_correct({"query": query, "key": key, "value": value})


def test_operand_repeated_by_strides_has_a_gradient_for_each_element(isa):
    call = call_with([])
    call["key"] = np.broadcast_to(call["key"][:1], call["key"].shape)
    assert_gradients_correct(call)


@pytest.mark.parametrize("low", [-90.0, -1e4, -1e6])
@pytest.mark.parametrize("dtype", DTYPES)
def test_lse_far_below_the_range_of_exp(low, dtype, isa):
    call = call_with([], dtype) | {"attn_mask": np.full((37, 150), low)}
    _, lse = mha_fast.attention(**call, return_lse=True)
    assert lse.max() < low + 20
    assert_gradients_correct(call)


@pytest.mark.parametrize("low", [-1e9, -1e20, float(np.finfo(np.float32).min)])
@pytest.mark.parametrize("dtype", [*DTYPES, *DTYPES_16])
def test_keys_that_a_mask_of_low_numbers_hides_all_alike_share_the_weight(low, dtype, isa):
    """The logarithm of their number is lost in the lse, but not in the gradients."""
    call = call_with([], dtype)
    call["query"][..., 5:9, :] = 0
    grad_out, grad_lse = random_grads(call)
    mask = np.zeros((37, 150), np.float32)
    right = backward(call | {"attn_mask": mask}, grad_out, grad_lse=grad_lse, wanted=WITH_MASK)

    mask[5:9] = low
    found = backward(call | {"attn_mask": mask}, grad_out, grad_lse=grad_lse, wanted=WITH_MASK)

    eps = max(_finfo(dtype).eps, np.finfo(np.float32).eps)  # the gradient of the mask has 32 bits
    for grad, right_grad in zip(found, right, strict=True):
        wide, right_wide = grad.astype(np.float64), right_grad.astype(np.float64)
        assert_close_to_largest(wide, right_wide, 8 * float(eps))


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_sum_to_1_in_packed_sequences_too(dtype, isa):
    """Far from all keys, a bias by distance is the same for all of them."""
    query, key, value = (
        x.swapaxes(0, 1) for x in normal_inputs(dtype, batch=(), n_query=9, n_key=40)
    )
    query[...] = 0
    far = {"alibi_slopes": np.ones(4), "query_offset": 2**40 if dtype == np.float32 else 2**58}
    ends = [0, 4, 9], [0, 15, 40]
    out, lse = mha_fast.attention_varlen(query, key, value, *ends, return_lse=True, **far)
    grad_out = np.ones_like(out)

    _, _, grad_value = mha_fast.attention_varlen_backward(
        grad_out, query, key, value, out, lse, *ends, **far
    )

    limit = 100 * np.finfo(dtype).eps
    np.testing.assert_allclose(grad_value[:15].sum(axis=(0, 1)), 4 * 4, rtol=limit)
    np.testing.assert_allclose(grad_value[15:].sum(axis=(0, 1)), 5 * 4, rtol=limit)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("factor", [1e3, 1e12, 1e17])
def test_huge_logits(factor, dtype, isa):
    """The weight of the largest logit is 1 whatever the rounding of lse was."""
    call = call_with([], dtype)
    call["query"] = (call["query"] * factor).astype(dtype)
    for grad in backward(call, random_grads(call)[0]):
        assert np.isfinite(grad).all()
    grad_value = backward(call, random_grads(call)[0])[2]
    right = reference.attention_backward(
        random_grads(call)[0], call["query"], call["key"], call["value"], None, None
    )[2]
    assert np.median(np.abs(grad_value - right)) <= 1e-4


LAYOUTS = {
    "of one number": lambda grad: np.broadcast_to(grad.dtype.type(0.5), grad.shape),
    "of one row": lambda grad: np.broadcast_to(grad[:1, :1, :1], grad.shape),
    "transposed": lambda grad: np.ascontiguousarray(grad.T).T,
    "every other": lambda grad: grad.repeat(2, axis=-1)[..., ::2],
    "backwards": lambda grad: grad[..., ::-1].copy()[..., ::-1],
    "foreign bytes": lambda grad: grad.astype(grad.dtype.newbyteorder()),
    "unaligned": lambda grad: unaligned(grad),
}


def unaligned(x):
    memory = np.zeros(x.nbytes + 1, np.uint8)
    view = memory[1:].view(x.dtype).reshape(x.shape)
    view[...] = x
    return view


@pytest.mark.parametrize("layout", LAYOUTS)
def test_grad_out_lies_in_memory_in_any_way(layout, isa):
    call = call_with(["causal"])
    grad_out, _ = random_grads(call)
    placed = LAYOUTS[layout](grad_out)
    placed.flags.writeable = False
    right = backward(call, np.array(placed, np.float64))

    for grad, right_grad in zip(backward(call, placed), right, strict=True):
        assert_same_bits(grad, right_grad)


def test_every_operand_lies_in_memory_in_any_way(isa):
    call = call_with([])
    grad_out, grad_lse = random_grads(call)
    out, lse = mha_fast.attention(**call, return_lse=True)
    arrays = [grad_out, *call.values(), out, lse, grad_lse]
    right = mha_fast.attention_backward(*arrays[:6], grad_lse=grad_lse)
    for name, place in LAYOUTS.items():
        if name in ("of one number", "of one row"):
            continue
        placed = [place(x) for x in arrays]
        found = mha_fast.attention_backward(*placed[:6], grad_lse=placed[6])
        for grad, right_grad in zip(found, right, strict=True):
            assert_same_bits(grad, right_grad)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_grouped_heads_are_summed_per_group(dtype, isa):
    call = call_with([], dtype, n_head=6, n_kv_head=2)
    assert_gradients_correct(call)


def test_one_head_without_an_axis(isa):
    query, key, value = (x[0, 0] for x in normal_inputs(np.float64))
    assert_gradients_correct({"query": query, "key": key, "value": value}, with_grad_lse=True)


# ---- NaN and Inf --------------------------------------------------------------------------------


@pytest.mark.parametrize("poison", [np.nan, np.inf])
@pytest.mark.parametrize("with_grad_lse", [False, True])
@pytest.mark.parametrize("kind", ["lengths", "bool mask", "float mask", "window"])
def test_what_is_excluded_leaves_no_trace(kind, with_grad_lse, poison, isa):
    """Neither Inf nor NaN in rows that do not see each other, nor behind a gate of 0."""
    n_query, n_key, hidden = 70, 150, slice(90, 130)
    call = call_with([], n_query=n_query, n_key=n_key) | {"head_mask": np.array([1.0, 0, 2.0, 0])}
    mask = np.ones((n_query, n_key), bool)
    mask[:, hidden] = mask[20] = False
    row = 20
    if kind == "lengths":
        call["kv_lengths"], hidden, row = 90, slice(90, None), slice(0)
    elif kind == "window":
        call["window"], hidden, row = (30, 0), slice(70, None), slice(0)
    else:
        call["attn_mask"] = mask if kind == "bool mask" else np.where(mask, 0.5, -np.inf)
    grad_out, grad_lse = random_grads(call)
    more = {"grad_lse": grad_lse} if with_grad_lse else {}

    def set_unseen(number):
        call["key"][..., hidden, :] = call["value"][..., hidden, :] = number
        call["query"][..., row, :] = grad_out[..., row, :] = number
        grad_out[:, [1, 3]] = number
        if not with_grad_lse:
            call["query"][:, [1, 3]] = number

    set_unseen(0.0)
    right = backward(call, grad_out, **more)
    set_unseen(poison)
    found = backward(call, grad_out, **more)

    for grad, right_grad in zip(found, right, strict=True):
        assert_close_to_largest(grad, right_grad, 1e-12)
    assert not found[0][..., row, :].any()
    assert not found[1][..., hidden, :].any() and not found[2][..., hidden, :].any()
    assert with_grad_lse or not found[0][:, [1, 3]].any()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", ["query", "key", "value", "grad_out"])
def test_nan_reaches_what_depends_on_it_and_no_more(name, dtype, isa):
    call = call_with(["causal"], dtype, n_query=100, n_key=100)
    grad_out, _ = random_grads(call)
    (grad_out if name == "grad_out" else call[name])[0, 1, 40, 0] = np.nan

    found = backward(call, grad_out)
    right = backward(call, grad_out, of=reference)
    for grad, right_grad in zip(found, right, strict=True):
        np.testing.assert_array_equal(np.isnan(grad), np.isnan(right_grad))


# ---- the same bits ------------------------------------------------------------------------------

# One pair of many chunks, which go round in a ring; pairs that threads take whole; uneven sizes.
BIT_SHAPES = {
    "long": {"batch": (), "n_head": 1, "n_kv_head": 1, "n_query": 900, "n_key": 700},
    "many": {"batch": (9,), "n_query": 130, "n_key": 130},
    "groups": {"batch": (), "n_head": 6, "n_kv_head": 2, "n_query": 200, "n_key": 600},
}


@pytest.mark.parametrize("names", [[], ["causal"], ["float mask", "sinks", "softcap"]], ids=str)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("shape", BIT_SHAPES)
def test_same_bits_for_any_number_of_threads(shape, dtype, names, isa):
    names = [name for name in names if name != "sinks" or BIT_SHAPES[shape].get("n_head", 4) == 4]
    call = without_threads(call_with(names, dtype, **BIT_SHAPES[shape]))
    grad_out, grad_lse = random_grads(call)
    more = {"grad_lse": grad_lse, "wanted": differentiable(call)}
    right = backward(call, grad_out, num_threads=1, **more)
    for num_threads in (2, 3, 7, None):
        for grad, right_grad in zip(
            backward(call, grad_out, num_threads=num_threads, **more), right, strict=True
        ):
            assert_same_bits(grad, right_grad)


def test_same_bits_alone_and_in_a_batch(isa):
    call = call_with(["causal", "alibi per sequence"], np.float32, n_query=300, n_key=280)
    grad_out, _ = random_grads(call)
    wanted = ("query", "key", "value", "alibi_slopes")
    together = backward(call, grad_out, wanted=wanted)
    for b in range(2):
        one = call | {name: call[name][b] for name in wanted}
        alone = backward(one, grad_out[b], wanted=wanted, num_threads=1)
        for grad, right_grad in zip(alone, together, strict=True):
            assert_same_bits(grad, right_grad[b])


# ---- packed sequences ---------------------------------------------------------------------------

CU_Q, CU_K = [0, 0, 300, 340, 340, 345], [0, 40, 320, 320, 330, 400]  # empty ones on either side


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_packed_sequences_have_the_bits_of_calls_of_their_own(dtype, isa):
    rng = np.random.default_rng(2)
    query, key, value = (
        rng.standard_normal(shape).astype(dtype)
        for shape in ((CU_Q[-1], 4, 20), (CU_K[-1], 2, 20), (CU_K[-1], 2, 12))
    )
    slopes, gates = rng.random((5, 4)), rng.random(4)
    options = {"is_causal": True, "query_offset": "end", "sinks": rng.standard_normal(4)}
    per_head = {"alibi_slopes": slopes, "head_mask": gates}
    out, lse = mha_fast.attention_varlen(
        query, key, value, CU_Q, CU_K, return_lse=True, **options, **per_head
    )
    grad_out = rng.standard_normal(out.shape).astype(dtype)
    grad_lse = rng.standard_normal(lse.shape).astype(lse.dtype)
    wanted = ("query", "key", "value", "sinks", "alibi_slopes", "head_mask")
    found = mha_fast.attention_varlen_backward(
        grad_out, query, key, value, out, lse, CU_Q, CU_K,
        grad_lse=grad_lse, wanted=wanted, **options, **per_head,
    )  # fmt: skip

    for i in range(5):
        rows, keys = slice(*CU_Q[i : i + 2]), slice(*CU_K[i : i + 2])
        alone = mha_fast.attention_backward(
            *(x[part].swapaxes(0, 1) for x, part in
              ((grad_out, rows), (query, rows), (key, keys), (value, keys), (out, rows))),
            lse[rows].T, grad_lse=grad_lse[rows].T, wanted=wanted, **options,
            alibi_slopes=slopes[i], head_mask=gates,
        )  # fmt: skip
        for grad, part, right in zip(found, (rows, keys, keys), alone, strict=False):
            assert_same_bits(grad[part], np.ascontiguousarray(right.swapaxes(0, 1)))
        np.testing.assert_allclose(found[4][i], alone[4], rtol=1e-5, atol=1e-5)
    right = reference.attention_varlen_backward(
        grad_out, query, key, value, out, lse, CU_Q, CU_K,
        grad_lse=grad_lse, wanted=wanted, **options, **per_head,
    )  # fmt: skip
    eps = np.finfo(np.float64 if dtype == np.float64 else np.float32).eps
    for name, grad, right_grad in zip(wanted[3:], found[3:], right[3:], strict=True):
        assert np.abs(grad - right_grad).max() <= 100 * eps * np.abs(right_grad).max(), name


# ---- wrong arguments ----------------------------------------------------------------------------

ERRORS = {
    "dtype": (
        {"grad_out": np.ones((2, 4, 5, 6), np.float32)},
        TypeError,
        "grad_out float32 float64",
    ),
    "shape": (
        {"grad_out": np.ones((2, 4, 5, 7))},
        ValueError,
        "grad_out (2, 4, 5, 7) (2, 4, 5, 6)",
    ),
    "out": ({"out": np.ones((4, 5, 6))}, ValueError, "out (4, 5, 6) (2, 4, 5, 6)"),
    "lse": ({"lse": np.ones((2, 4, 6))}, ValueError, "lse (2, 4, 6) (2, 4, 5)"),
    "lse dtype": ({"lse": np.ones((2, 4, 5), np.float32)}, TypeError, "lse float32 float64"),
    "no lse": ({"lse": None}, TypeError, "lse None array"),
    "grad_lse": ({"grad_lse": np.ones((2, 4))}, ValueError, "grad_lse (2, 4) (2, 4, 5)"),
    "name": ({"wanted": ["keys"]}, ValueError, "wanted 'keys' query key"),
    "no name": ({"wanted": "key"}, TypeError, "wanted 'key' sequence"),
    "twice": ({"wanted": ("key", "key")}, ValueError, "wanted once"),
    "not given": ({"wanted": ["sinks"]}, ValueError, "wanted 'sinks' given"),
    "bools": (
        {"wanted": ["attn_mask"], "attn_mask": np.ones((5, 7), bool)},
        ValueError,
        "wanted 'attn_mask' bools float",
    ),
    "option": ({"scale": np.nan}, ValueError, "scale nan"),
    "dropout": ({"dropout_p": 1.0}, ValueError, "dropout_p 1.0 below 1"),
    "no seed": ({"dropout_p": 0.5}, ValueError, "dropout_seed None 64 bits"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_wrong_arguments(name):
    wrong, error, words = ERRORS[name]
    call = {
        "grad_out": np.ones((2, 4, 5, 6)), "query": np.ones((2, 4, 5, 3)),
        "key": np.ones((2, 2, 7, 3)), "value": np.ones((2, 2, 7, 6)),
        "out": np.ones((2, 4, 5, 6)), "lse": np.ones((2, 4, 5)),
    }  # fmt: skip
    mha_fast.attention_backward(**call)

    with pytest.raises(error) as raised:
        mha_fast.attention_backward(**call | wrong)

    message = str(raised.value)
    assert message.startswith(words.split()[0])
    assert all(word in message for word in words.split())


def test_lse_of_the_matrix_unit_is_good_enough(isa):
    """Its lse of bfloat16 is within 2**-9, as much as one rounding of the gradients is off."""
    if isa != "amx, all sizes":
        pytest.skip("about the matrix unit")
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    call = call_with(["causal"], bfloat16, n_query=256, n_key=256, head_width=64, value_width=64)
    grad_out, _ = random_grads(call)
    right = reference.attention_backward(grad_out, out=None, lse=None, **call)

    def rms_errors():
        out, lse = mha_fast.attention(**call, return_lse=True)
        found = mha_fast.attention_backward(grad_out, out=out, lse=lse, **call)
        return [
            np.sqrt(np.mean((grad.astype(np.float64) - right_grad) ** 2))
            for grad, right_grad in zip(found, right, strict=True)
        ]

    by_matrix_unit = rms_errors()
    with using_isa("avx512"):
        by_tiles = rms_errors()

    assert all(a <= 1.1 * b for a, b in zip(by_matrix_unit, by_tiles, strict=True))
