"""jax.nn.dot_product_attention on the kernels, under jit, vmap and grad, against JAX's own."""

import numpy as np
import pytest

jax = pytest.importorskip("jax", reason="needs the extra mha_fast[jax]")

import jax.numpy as jnp

import mha_fast.jax

ours = mha_fast.jax.dot_product_attention
theirs = jax.nn.dot_product_attention


def normal(*shapes, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def inputs(dtype="float32", kv_heads=4):
    return normal((2, 33, 4, 16), (2, 40, kv_heads, 16), (2, 40, kv_heads, 16), dtype=dtype)


def assert_close(x, right, dtype="float32"):
    assert x.shape == right.shape
    assert x.dtype == right.dtype
    x, right = (np.asarray(y, np.float64) for y in (x, right))
    np.testing.assert_allclose(
        x, right, rtol=0, atol=64 * float(jnp.finfo(dtype).eps) * np.abs(right).max()
    )


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (5, 3)},
    "one number as window": {"local_window_size": 6},
    "causal window": {"local_window_size": (5, 3), "is_causal": True},
    "key lengths": {"key_value_seq_lengths": np.array([40, 17], np.int32)},
    "bias": {"bias": (1, 4, 33, 40)},
    "mask": {"mask": (2, 1, 33, 40)},
    "bias and mask": {"bias": (2, 4, 1, 40), "mask": (2, 1, 33, 40)},
}


def made(options):
    """Options whose arrays were given by their shapes."""
    result = dict(options)
    if "bias" in result:
        (result["bias"],) = normal(result["bias"], seed=3)
    if "mask" in result:
        (numbers,) = normal(result["mask"], seed=4)
        result["mask"] = (numbers > -0.5).at[..., 0].set(True)
    return result


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_result_is_that_of_jax(options, kv_heads):
    x, options = inputs(kv_heads=kv_heads), made(options)
    out, lse = ours(*x, **options, return_residual=True)
    right, right_lse = theirs(*x, **options, return_residual=True)
    assert_close(out, right)
    assert_close(lse, right_lse)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit(dtype):
    x = inputs(dtype)
    assert_close(ours(*x), theirs(*x), dtype)


def test_without_a_batch():
    x = [y[0] for y in inputs()]
    assert_close(ours(*x, is_causal=True), theirs(*x, is_causal=True))


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_jit(options):
    x, options = inputs(), made(options)
    arrays = {name: y for name, y in options.items() if hasattr(y, "shape")}
    rest = {name: y for name, y in options.items() if name not in arrays}
    out = jax.jit(lambda x, arrays: ours(*x, **arrays, **rest))(x, arrays)
    assert (out == ours(*x, **options)).all()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_those_of_jax(options):
    x, options = inputs(kv_heads=2), made(options)
    bias = options.pop("bias", None)
    (weight,) = normal((2, 33, 4, 16), seed=7)

    def loss(function):
        return lambda *args: (function(*args, **options) * weight).sum()

    which = (0, 1, 2) if bias is None else (0, 1, 2, 3)
    found = jax.jit(jax.grad(loss(ours), which))(*x, bias)
    expected = jax.grad(loss(theirs), which)(*x, bias)
    for gradient, right in zip(found, expected, strict=True):
        assert_close(gradient, right)


def test_gradient_of_the_residual():
    """JAX's own gives none."""
    query, key = normal((2, 9, 4, 8), (2, 7, 4, 8))

    def of_kernel(query, key):
        return jnp.square(ours(query, key, key, return_residual=True)[1]).sum()

    def of_formula(query, key):
        scores = jnp.einsum("btnh,bsnh->btns", query, key) / 8**0.5
        return jnp.square(jax.nn.logsumexp(scores, axis=-1)).sum()

    for x, right in zip(
        jax.grad(of_kernel, (0, 1))(query, key),
        jax.grad(of_formula, (0, 1))(query, key),
        strict=True,
    ):
        assert_close(x, right)


def test_vmap():
    query, key, value = normal((3, 2, 33, 4, 16), (2, 40, 2, 16), (3, 2, 40, 2, 16))
    lengths = jnp.array([[40, 3], [17, 40], [1, 20]])

    def call(query, value, lengths):
        return ours(query, key, value, key_value_seq_lengths=lengths, is_causal=True)

    out = jax.vmap(call)(query, value, lengths)
    right = jnp.stack([call(*one) for one in zip(query, value, lengths, strict=True)])
    assert (out == right).all()


def test_vmap_of_grad():
    x = normal((3, 9, 4, 8))[0]
    gradient = jax.vmap(jax.grad(lambda y: jnp.square(ours(y, y, y)).sum()))(x)
    right = jax.vmap(jax.grad(lambda y: jnp.square(theirs(y, y, y)).sum()))(x)
    assert_close(gradient, right)


def test_a_long_call_under_jit_ends():
    """Arguments of a callback are handed over while the program waits for it."""
    (x,) = normal((4, 1024, 8, 64))
    function = jax.jit(lambda x: ours(x * 2, x, x + 1).sum())
    for _ in range(3):
        assert np.isfinite(float(function(x)))


def test_rows_without_a_key_are_zero():
    """As documented: JAX gives a mean of values."""
    x = inputs()
    out, lse = ours(
        *x, key_value_seq_lengths=jnp.array([40, 0]), query_seq_lengths=jnp.array([10, 33]),
        return_residual=True,
    )  # fmt: skip
    assert not out[1].any() and not out[0, 10:].any()
    assert (lse[1] == -jnp.inf).all() and (lse[0, 10:] == -jnp.inf).all()
    right = theirs(*x)
    assert_close(out[0, :10], right[0, :10])


def test_hidden_nan_has_no_influence():
    query, key, value = inputs()
    lengths = jnp.array([40, 17])
    right = ours(query, key, value, key_value_seq_lengths=lengths)
    spoilt = value.at[1, 17:].set(jnp.nan)
    assert (ours(query, key, spoilt, key_value_seq_lengths=lengths) == right).all()


def test_errors_name_the_argument():
    query, key, value = inputs()
    with pytest.raises(ValueError, match=r"key has shape \(2, 40, 4, 8\); expected width 16"):
        ours(query, key[..., :8], value)
    with pytest.raises(TypeError, match=r"value has dtype float16; expected one floating dtype"):
        ours(query, key, value.astype("float16"))
    with pytest.raises(ValueError, match=r"bias has shape \(33, 40\); expected four axes"):
        ours(query, key, value, jnp.zeros((33, 40)))
    with pytest.raises(TypeError, match=r"mask has dtype float32; expected bool"):
        ours(query, key, value, mask=jnp.zeros((1, 1, 33, 40)))
    with pytest.raises(ValueError, match=r"key_value_seq_lengths has shape \(3,\)"):
        ours(query, key, value, key_value_seq_lengths=jnp.ones(3, int))
    with pytest.raises(ValueError, match=r"query has 4 heads; expected a multiple of the 3"):
        ours(query, key[:, :, :3], value[:, :, :3])
