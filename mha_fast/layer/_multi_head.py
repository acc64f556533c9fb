"""MultiHeadAttention: the four projections around attention(), with weights that are NumPy arrays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import numpy.typing as npt

from .. import _checks
from .._attention import attention
from .._options import LAYER, LAYER_TRAINING, BackwardOptions, LayerOptions
from .._typing import Array, ArrayLike, Index
from ..cache import KVCache
from . import _inputs, _training, _weights
from ._inputs import Position
from ._parameters import Parameters
from ._sizes import KEY, QUERY, VALUE, LayerSizes, check_sizes
from ._training import Activations
from ._views import HeadViews
from ._weights import Init, Module, Seed, Style

_PARAMETERS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")


class MultiHeadAttention(HeadViews):
    """Multi-head attention with its projections: ``concat(head_1, …, head_n) @ W_O + b_O``.

    Head i is ``attention(query @ W_Q[i] + b_Q[i], key @ W_K[j] + b_K[j], value @ W_V[j] + b_V[j])``
    where j is the key/value head of its group.

    Parameters
    ----------
    embed_dim : int
        Width of a query token, and of the result.
    num_heads : int
        Number of heads.
    num_kv_heads : int, optional
        Number of key/value heads, of which `num_heads` must be a multiple; default `num_heads`.
    head_width : int, optional
        Width of a query and of a key; default ``embed_dim / num_heads``, which must be whole.
    value_width : int, optional
        Width of a value; default `head_width`.
    bias : bool
        Whether W_Q, W_K and W_V have biases.
    out_bias : bool, optional
        Whether W_O has one; default `bias`.
    kdim, vdim : int, optional
        Widths of a token of key and of value; default `embed_dim`.
    dtype : dtype
        float16, bfloat16, float32 or float64: of the weights, of what comes in, and of the result.
    init : {"xavier_uniform", "xavier_normal", "lecun_normal", "gpt_normal", "zeros"}
        How each of the four matrices is drawn, with ``n_in`` and ``n_out`` those of the whole
        matrix over all heads. Biases start at 0.

        ==============  ==========================================  ==============================
        xavier_uniform  uniform up to ``sqrt(6 / (n_in + n_out))``  Glorot and Bengio 2010, eq. 16
        xavier_normal   deviation ``sqrt(2 / (n_in + n_out))``      Glorot and Bengio 2010, eq. 12
        lecun_normal    deviation ``sqrt(1 / n_in)``                LeCun et al. 1998, section 4.6
        gpt_normal      deviation 0.02                              Radford et al. 2018, section 4.1
        zeros           0, for weights that will be written         none
        ==============  ==========================================  ==============================

    seed : int, Generator or anything else that `numpy.random.default_rng` takes, optional
        The same seed gives the same weights, in every dtype up to its rounding. None draws new
        ones each time.
    position : callable, optional
        Called as ``position(heads, positions)`` with query heads and with key heads, and returns
        what to use in their place, of the same shape and dtype: a rotary embedding, see `apply_rotary`.
        `heads` is (..., heads, n_token, head_width), and `positions` are ints that broadcast to
        all its axes but the last. Keys count from 0, queries from `query_offset`; with a cache both
        count from the length of their sequence.

    Attributes
    ----------
    W_Q, W_K, W_V, W_O : array
        (num_heads, embed_dim, head_width), (num_kv_heads, kdim, head_width),
        (num_kv_heads, vdim, value_width) and (num_heads, value_width, embed_dim): views, and what
        is written to them is what the layer computes with.
    b_Q, b_K, b_V, b_O : array or None
        (heads, width) and (embed_dim,): views as well.

    Raises
    ------
    TypeError, ValueError
        A size, a dtype or the name of an initialisation that does not fit.

    Notes
    -----
    A matrix lies as (out, in), and those of inputs of equal width lie one behind the other. So an
    input that serves as query, key and value is projected in one product, and the heads of the
    result are read, by strides, where that product wrote them. `attention` writes what it gathers
    side by side for the product with W_O. Nothing is copied in between.

    The products are NumPy's, with the threads of its BLAS; `num_threads` is of the attention
    alone, and so is the promise of the same bits for any number of threads. 16-bit weights are
    widened to float32 in strips for each product, which is rounded to 16 bits at its end.

    A call does not change the layer (but it does change a cache); several threads may call one.

    torch.nn.MultiheadAttention marks with True what a query must *not* see. Here True lets the key
    through: pass ``~mask``; for right-padded batches, pass the number of real tokens as
    `kv_lengths`.

    References
    ----------
    Vaswani et al. 2017, section 3.2.2. Grouped heads: Ainslie et al. 2023. Rotary embedding: Su et
    al. 2021.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.layer import MultiHeadAttention
    >>> layer = MultiHeadAttention(512, 8, seed=0)
    >>> tokens = np.random.default_rng(0).standard_normal((2, 100, 512), dtype=np.float32)
    >>> layer(tokens, is_causal=True).shape
    (2, 100, 512)
    >>> layer.n_parameter
    1050624

    Keys and values of an encoder, projected once for all steps of a decoder:

    >>> memory, step = tokens, tokens[:, :1]
    >>> cache = layer.new_cache(n_batch=2)
    >>> cache.append(*layer.project_key_value(memory))
    >>> heads = cache.attend(layer.project_query(step), is_causal=False)
    >>> bool(np.allclose(layer.project_output(heads), layer(step, memory), atol=1e-6))
    True
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_width: int | None = None,
        value_width: int | None = None,
        bias: bool = True,
        out_bias: bool | None = None,
        kdim: int | None = None,
        vdim: int | None = None,
        dtype: npt.DTypeLike = np.float32,
        init: Init = "xavier_uniform",
        seed: Seed = None,
        position: Position | None = None,
    ) -> None:
        sizes = check_sizes(embed_dim, num_heads, num_kv_heads, head_width, value_width, kdim, vdim)
        dtype = _checks.float_dtype(dtype)
        bias = _checks.flag("bias", bias)
        out_bias = bias if out_bias is None else _checks.flag("out_bias", out_bias)
        if position is not None and not callable(position):
            raise TypeError(f"position is {position!r}; expected a callable")
        draw = _weights.drawing(init, seed)
        self.position = position
        self._parameters = Parameters(sizes, dtype, bias=bias, out_bias=out_bias)
        tensors = self._parameters.tensors()
        for matrix in (*tensors.weights, tensors.out_weight):
            matrix[...] = draw(*matrix.shape)

    # ---- from and to the files of others --------------------------------------------------------

    @classmethod
    def from_torch(
        cls,
        tensors: Mapping[str, ArrayLike] | Module,
        num_heads: int | None = None,
        *,
        prefix: str = "",
        dtype: npt.DTypeLike | None = None,
    ) -> Self:
        """Make a layer from the state dict of a torch.nn.MultiheadAttention.

        Parameters
        ----------
        tensors : mapping of str to array
            ``in_proj_weight`` or ``q_proj_weight``, ``k_proj_weight`` and ``v_proj_weight``;
            ``out_proj.weight``; and, if there are biases, ``in_proj_bias`` and ``out_proj.bias``.
            Arrays or CPU tensors, bfloat16 ones too; they are copied. A module will do that has a
            ``state_dict()`` with these names; it must take its batch first.
        num_heads : int, optional
            Number of heads; the tensors do not tell, but a module does.
        prefix : str
            What stands before these names, like ``"encoder.layers.0.self_attn"``, with or without
            a dot at its end. Tensors whose names begin otherwise are not looked at.
        dtype : dtype, optional
            Dtype of the layer; default that of the tensors.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError
            Tensors of several dtypes, or of one that a layer cannot have, with no `dtype` given; a
            path instead of what is in the file.
        ValueError
            A module with its batch second; a tensor that is missing (with the prefixes that would find it), does not fit, or is not known (``bias_k`` and ``bias_v`` too).
        """
        return cls._from_tensors(tensors, "torch", num_heads, prefix, dtype, None)

    @classmethod
    def from_bert(
        cls,
        tensors: Mapping[str, ArrayLike] | Module,
        num_heads: int | None = None,
        *,
        prefix: str = "",
        dtype: npt.DTypeLike | None = None,
    ) -> Self:
        """Make a layer from tensors that are named as in BERT.

        Parameters
        ----------
        tensors : mapping of str to array
            ``self.query.weight``, ``self.key.weight``, ``self.value.weight``,
            ``output.dense.weight`` and their biases. ``output.LayerNorm`` is passed over: it comes
            after the layer and its residual.
        num_heads, dtype
            As in `from_torch`.
        prefix : str
            As in `from_torch`, like ``"encoder.layer.0.attention"``.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError, ValueError
            As `from_torch`.
        """
        return cls._from_tensors(tensors, "bert", num_heads, prefix, dtype, None)

    @classmethod
    def from_llama(
        cls,
        tensors: Mapping[str, ArrayLike] | Module,
        num_heads: int | None = None,
        *,
        prefix: str = "",
        dtype: npt.DTypeLike | None = None,
        position: Position | None = None,
    ) -> Self:
        """Make a layer from tensors that are named as in LLaMA.

        Parameters
        ----------
        tensors : mapping of str to array
            ``q_proj.weight``, ``k_proj.weight``, ``v_proj.weight``, ``o_proj.weight`` and, where
            there are any, their biases. The number of key/value heads follows from the shapes.
        num_heads, dtype
            As in `from_torch`.
        prefix : str
            As in `from_torch`, like ``"model.layers.0.self_attn"``.
        position : callable, optional
            The rotary embedding, as for `MultiHeadAttention`: `apply_rotary`, or a partial of it with
            another base. These models were trained with one, and without it the result is not theirs.

        Returns
        -------
        MultiHeadAttention

        Raises
        ------
        TypeError, ValueError
            As `from_torch`. Norms of query and key heads (``q_norm``, ``k_norm``) are not known.

        Examples
        --------
        With the rotary embedding of these tensors, whose base the model's configuration tells:

        >>> import numpy as np, mha_fast
        >>> rng = np.random.default_rng(0)
        >>> shapes = {"q_proj": (64, 64), "k_proj": (16, 64), "v_proj": (16, 64), "o_proj": (64, 64)}
        >>> tensors = {f"{name}.weight": rng.normal(0, 0.1, n) for name, n in shapes.items()}
        >>> rotary = mha_fast.apply_rotary
        >>> MultiHeadAttention.from_llama(tensors, num_heads=8, position=rotary).num_kv_heads
        2
        """
        return cls._from_tensors(tensors, "llama", num_heads, prefix, dtype, position)

    def state_dict(self, style: Style = "torch", *, prefix: str = "") -> dict[str, Array]:
        """Copy the weights out under the names of others, as `from_torch` and its kin read them.

        Parameters
        ----------
        style : {"torch", "bert", "llama"}
            Whose names. torch has no grouped heads, and its heads must fill `embed_dim`.
        prefix : str
            Put before each name, with a dot between.

        Returns
        -------
        dict of str to array
            Contiguous arrays in the dtype of the layer.

        Raises
        ------
        ValueError
            A layer that the style has no form for.
        """
        tensors = self._parameters.tensors()
        named = _weights.written(tensors, self._sizes, style, prefix)
        return {name: x.copy() for name, x in named.items()}

    # ---- what it holds ------------------------------------------------------------------------

    @property
    def embed_dim(self) -> int:
        """Width of a query token, and of the result."""
        return self._sizes.embed_dim

    @property
    def num_heads(self) -> int:
        """Number of heads."""
        return self._sizes.n_head

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self._sizes.n_kv_head

    @property
    def head_width(self) -> int:
        """Width of a query and of a key."""
        return self._sizes.head_width

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self._sizes.value_width

    @property
    def kdim(self) -> int:
        """Width of a key token."""
        return self._sizes.kdim

    @property
    def vdim(self) -> int:
        """Width of a value token."""
        return self._sizes.vdim

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the weights, of what comes in, and of the result."""
        return self._parameters.dtype

    @property
    def n_parameter(self) -> int:
        """Number of weights and biases."""
        return sum(x.size for x in self._parameters.arrays())

    @property
    def nbytes(self) -> int:
        """Bytes of the weights and biases."""
        return sum(x.nbytes for x in self._parameters.arrays())

    @property
    def W_Q(self) -> Array:
        """View of the query matrices, (num_heads, embed_dim, head_width)."""
        return self._parameters.weight_per_head(QUERY)

    @property
    def W_K(self) -> Array:
        """View of the key matrices, (num_kv_heads, kdim, head_width)."""
        return self._parameters.weight_per_head(KEY)

    @property
    def W_V(self) -> Array:
        """View of the value matrices, (num_kv_heads, vdim, value_width)."""
        return self._parameters.weight_per_head(VALUE)

    @property
    def W_O(self) -> Array:
        """View of the output matrices, (num_heads, value_width, embed_dim)."""
        return self._parameters.out_weight_per_head()

    @property
    def b_Q(self) -> Array | None:
        """View of the query biases, (num_heads, head_width), or None."""
        return self._parameters.bias_per_head(QUERY)

    @property
    def b_K(self) -> Array | None:
        """View of the key biases, (num_kv_heads, head_width), or None."""
        return self._parameters.bias_per_head(KEY)

    @property
    def b_V(self) -> Array | None:
        """View of the value biases, (num_kv_heads, value_width), or None."""
        return self._parameters.bias_per_head(VALUE)

    @property
    def b_O(self) -> Array | None:
        """View of the output bias, (embed_dim,), or None."""
        return self._parameters.out_bias

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={n}" for name, n in self._sizes.arguments().items())
        return (
            f"{type(self).__name__}({sizes}, bias={self.b_Q is not None}, "
            f"out_bias={self.b_O is not None}, dtype={self.dtype})"
        )

    # ---- the layer ----------------------------------------------------------------------------

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        value: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        cache: KVCache | None = ...,
        counts: ArrayLike | None = ...,
        is_causal: bool | None = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[LayerOptions],
    ) -> Array: ...

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        value: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        cache: KVCache | None = ...,
        counts: ArrayLike | None = ...,
        is_causal: bool | None = ...,
        return_lse: Literal[True],
        **options: Unpack[LayerOptions],
    ) -> tuple[Array, Array]: ...

    @overload
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = ...,
        value: ArrayLike | None = ...,
        attn_mask: ArrayLike | None = ...,
        *,
        cache: KVCache | None = ...,
        counts: ArrayLike | None = ...,
        is_causal: bool | None = ...,
        return_lse: bool,
        **options: Unpack[LayerOptions],
    ) -> Array | tuple[Array, Array]: ...

    @LAYER.shown
    def __call__(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
        *,
        cache: KVCache | None = None,
        counts: ArrayLike | None = None,
        is_causal: bool | None = None,
        return_lse: bool = False,
        **options: Unpack[LayerOptions],
    ) -> Array | tuple[Array, Array]:
        """Attend to tokens.

        Parameters
        ----------
        query : array, (..., n_query, embed_dim)
            Tokens that attend, in the dtype of the layer.
        key : array, (..., n_key, kdim), optional
            Tokens that are attended to; default `query`: self-attention.
        value : array, (..., n_key, vdim), optional
            What is gathered from them; default `key`.
        attn_mask : array, optional
            Broadcastable to (..., num_heads, n_query, n_key), as in `attention`: True lets the key
            through.
        cache : KVCache, optional
            The query's keys and values are appended to it, then the query attends to all it
            holds. For self-attention: `query` is (n_batch, n_query, embed_dim) and `key` and
            `value` are not given, nor are `query_offset` and `kv_lengths`, which the cache knows.
            See `new_cache`.
        counts : int or int array (n_batch,), optional
            With a cache: number of real tokens of each sequence, the rest being padding, for
            which `b_O` (or 0) comes out.
        is_causal : bool, optional
            Default True with a cache and False without.
        window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, head_mask
            As in `attention`. The scale is by default ``1 / sqrt(head_width)``.
        return_lse, precision, num_threads
            As in `attention`.
        out : array, (..., n_query, embed_dim), optional
            Receives the result. Exact shape and dtype, any strides; may overlap the inputs.

        Returns
        -------
        out : array, (..., n_query, embed_dim)
            Where a query has no key left, `b_O` or 0.
        lse : array, (..., num_heads, n_query)
            With `return_lse`.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As `attention`, and for inputs or a cache that do not fit the layer. `out` and the
            tokens of the cache are then as they were.
        """
        LAYER.check_names(options)
        passed: dict[str, Any] = dict(options)
        if is_causal is not None:
            passed["is_causal"] = is_causal
        out = passed.pop("out", None)
        query_offset, kv_lengths = passed.get("query_offset", 0), passed.get("kv_lengths")
        if cache is None:
            if counts is not None:
                raise ValueError("counts is given without cache; expected kv_lengths instead")
            inputs = _inputs.of_attention(self._sizes, self.dtype, query, key, value)
        else:
            given = {
                "key": key is not None,
                "value": value is not None,
                "kv_lengths": kv_lengths is not None,
                "query_offset": not (isinstance(query_offset, int) and query_offset == 0),
            }
            inputs = _inputs.of_cached_call(self._sizes, self.dtype, cache, query, given)
        batch_shape = _inputs.batch_shape(inputs)
        n_query, n_key = inputs[QUERY].shape[-2], inputs[KEY].shape[-2]
        self._check_out(out, (*batch_shape, n_query))
        heads = self._parameters.project(*inputs)
        joined = np.empty((*batch_shape, n_query, self.num_heads, self.value_width), self.dtype)
        passed["out"] = joined.swapaxes(-3, -2)
        if cache is None:
            if self.position is not None:
                first = _inputs.first_position(query_offset, kv_lengths, n_query, n_key)
                self._put_in_position(heads, _inputs.positions_from(first, n_query))
            result = attention(
                heads[QUERY], heads[KEY], heads[VALUE], attn_mask, return_lse=return_lse, **passed
            )
        else:
            if self.position is not None:
                positions = _inputs.positions_from(cache.lengths + cache.dropped, n_query)
                self._put_in_position(heads, positions, positions)
            for name in ("query_offset", "kv_lengths"):  # which have no effect, or were refused
                passed.pop(name, None)
            passed |= {"attn_mask": attn_mask, "return_lse": return_lse, "counts": counts}
            result = _attend_cached(cache, heads, passed)
        projected = self._parameters.output(joined, out)
        return (projected, result[1]) if return_lse else projected

    # ---- training -----------------------------------------------------------------------------

    def parameters(self) -> dict[str, Array]:
        """Views of all weights and biases by name, for an optimizer to write to.

        Returns
        -------
        dict of str to array
            ``W_Q``, ``W_K``, ``W_V``, ``W_O`` and those of ``b_Q``, ``b_K``, ``b_V``, ``b_O``
            that there are, with the shapes of these attributes.
        """
        named = {name: getattr(self, name) for name in _PARAMETERS}
        return {name: x for name, x in named.items() if x is not None}

    @LAYER_TRAINING.shown
    def forward_saving(
        self,
        query: ArrayLike,
        key: ArrayLike | None = None,
        value: ArrayLike | None = None,
        attn_mask: ArrayLike | None = None,
        **options: Unpack[BackwardOptions],
    ) -> tuple[Array, Activations]:
        """Attend to tokens, and keep what `backward` needs.

        Parameters
        ----------
        query, key, value, attn_mask
            As in a call of the layer.
        is_causal, window, query_offset, kv_lengths, scale, softcap, alibi_slopes, sinks, \
head_mask, precision, num_threads
            As in a call of the layer.
        dropout_p, dropout_seed
            As in `attention`: dropout of the weights.

        Returns
        -------
        out : array, (..., n_query, embed_dim)
            What the call without dropout would return.
        saved : Activations
            With the heads as attributes, for `head_statistics` and the like.

        Raises
        ------
        TypeError, ValueError, MemoryError
            As a call of the layer.

        Examples
        --------
        One step of gradient descent towards outputs that are all 0:

        >>> import numpy as np
        >>> from mha_fast.layer import MultiHeadAttention
        >>> layer = MultiHeadAttention(16, 4, seed=0)
        >>> tokens = np.random.default_rng(0).standard_normal((2, 10, 16), dtype=np.float32)
        >>> def loss(out):
        ...     return float((out**2).sum()) / 2
        >>> out, saved = layer.forward_saving(tokens, is_causal=True)
        >>> grads = layer.backward(out, saved)  # the gradient of this loss by `out` is `out`
        >>> sorted(grads)
        ['W_K', 'W_O', 'W_Q', 'W_V', 'b_K', 'b_O', 'b_Q', 'b_V', 'query']
        >>> for name, parameter in layer.parameters().items():
        ...     parameter -= 0.01 * grads[name]
        >>> loss(layer(tokens, is_causal=True)) < loss(out)
        True
        """
        LAYER_TRAINING.check_names(options)
        passed: dict[str, Any] = {**options, "attn_mask": attn_mask}
        inputs = _inputs.of_attention(self._sizes, self.dtype, query, key, value)
        batch_shape = _inputs.batch_shape(inputs)
        n_query, n_key = inputs[QUERY].shape[-2], inputs[KEY].shape[-2]
        heads = self._parameters.project(*inputs)
        positions = None
        if self.position is not None:
            offset, lengths = options.get("query_offset", 0), options.get("kv_lengths")
            first = _inputs.first_position(offset, lengths, n_query, n_key)
            positions = _inputs.positions_from(first, n_query), np.arange(n_key)
            self._put_in_position(heads, *positions)
        joined = np.empty((*batch_shape, n_query, self.num_heads, self.value_width), self.dtype)
        out = joined.swapaxes(-3, -2)
        q, k, v = heads
        _, lse = attention(q, k, v, out=out, return_lse=True, **passed)
        names = _training.names_of_inputs(key is not None, value is not None)
        saved = Activations(q, k, v, out, lse, inputs, names, positions, passed)
        return self._parameters.output(joined, None), saved

    def backward(
        self,
        grad_out: ArrayLike,
        saved: Activations,
        *,
        grad_lse: ArrayLike | None = None,
        wanted: Sequence[str] | None = None,
    ) -> dict[str, Array]:
        """Gradients of a number, from its gradient with respect to what `forward_saving` returned.

        Parameters
        ----------
        grad_out : array, (..., n_query, embed_dim)
            Gradient with respect to the output.
        saved : Activations
            What `forward_saving` of this layer returned beside it. The weights are taken as they
            are now: call `backward` before the optimizer changes them.
        grad_lse : array, (..., num_heads, n_query), optional
            Gradient with respect to ``saved.lse``.
        wanted : sequence of str, optional
            Which gradients to return: names from `parameters`; "query", and "key" and "value" if
            they were given; "attn_mask" (of floats), "sinks", "alibi_slopes" and "head_mask" if
            they were given. Default: those of the parameters and the tokens.

        Returns
        -------
        dict of str to array
            Each in the shape and dtype of the array it belongs to. Where `query` served as key
            and value too, its gradient is the sum of all three.

        Raises
        ------
        TypeError, ValueError
            Arrays that do not fit, a name that has no gradient, or a `position` without a known
            gradient.

        Notes
        -----
        A `position` is taken for a rotation, whose gradient is ``position(grad, -positions)``, and
        this is checked. Any other needs a method ``backward(grad_heads, positions)``.

        16-bit gradients are multiplied and summed in float32, and rounded at the end of each
        product.
        """
        return _training.backward(self, grad_out, saved, grad_lse, wanted)

    # ---- parts, and caches --------------------------------------------------------------------

    def new_cache(self, n_batch: int, *, capacity: int = 0) -> KVCache:
        """Make an empty cache for this layer.

        Parameters
        ----------
        n_batch : int
            Number of sequences.
        capacity : int
            Tokens per sequence to make room for now.

        Returns
        -------
        KVCache
            In the dtype of the layer.
        """
        return KVCache(
            n_batch,
            self.num_kv_heads,
            self.head_width,
            self.value_width,
            dtype=self.dtype,
            capacity=capacity,
        )

    def project_query(self, query: ArrayLike, positions: ArrayLike | None = None) -> Array:
        """Project tokens to query heads, as for `attention` and its kin.

        Parameters
        ----------
        query : array, (..., n_query, embed_dim)
        positions : int array broadcastable to (..., num_heads, n_query), optional
            For `position`; default 0, 1, 2 and on.

        Returns
        -------
        array, (..., num_heads, n_query, head_width)
            The heads of a token lie side by side.
        """
        (heads,) = self._parameters.project(
            _inputs.tokens(self._sizes, self.dtype, "query", query, QUERY)
        )
        return _inputs.in_position(self.position, heads, positions)

    def project_key_value(
        self,
        key: ArrayLike,
        value: ArrayLike | None = None,
        positions: ArrayLike | None = None,
    ) -> tuple[Array, Array]:
        """Project tokens to key and value heads, as for `attention`, its kin and `KVCache.append`.

        Parameters
        ----------
        key : array, (..., n_key, kdim)
        value : array, (..., n_key, vdim), optional
            Default `key`.
        positions : int array broadcastable to (..., num_kv_heads, n_key), optional
            For `position`; default 0, 1, 2 and on.

        Returns
        -------
        key : array, (..., num_kv_heads, n_key, head_width)
        value : array, (..., num_kv_heads, n_key, value_width)
        """
        inputs = _inputs.of_keys(self._sizes, self.dtype, key, value)
        keys, values = self._parameters.project(*inputs, first=KEY)
        return _inputs.in_position(self.position, keys, positions), values

    def project_output(self, heads: ArrayLike, out: Array | None = None) -> Array:
        """Join heads and project them, the last step of the layer.

        Parameters
        ----------
        heads : array, (..., num_heads, n_query, value_width)
            What `attention` returned. Not copied if the heads of a token lie side by side.
        out : array, (..., n_query, embed_dim), optional
            Receives the result.

        Returns
        -------
        array, (..., n_query, embed_dim)
        """
        array = _inputs.of_dtype(self.dtype, "heads", heads)
        shape = array.shape
        if array.ndim < 3 or (shape[-3], shape[-1]) != (self.num_heads, self.value_width):
            raise ValueError(
                f"heads has shape {shape}; expected (..., {self.num_heads}, queries, "
                f"{self.value_width})"
            )
        self._check_out(out, (*shape[:-3], shape[-2]))
        return self._parameters.output(array.swapaxes(-3, -2), out)

    def prune_heads(self, heads: Index) -> Self:
        """Make a smaller layer without some heads.

        Its output is that of this layer with a `head_mask` of 0 for these heads.

        Parameters
        ----------
        heads : int, slice, or list or array of ints or bools
            Which query heads to leave out. All of them may go: what is left gives `b_O`.

        Returns
        -------
        MultiHeadAttention
            With weights of its own. The heads that stay keep their order; arguments with a number
            per head shrink likewise: ``np.delete(alibi_slopes, heads)``.

        Raises
        ------
        TypeError
            `heads` is no index.
        ValueError
            An index out of range, or grouped heads of which different numbers would stay.

        Notes
        -----
        A key/value head goes with the last query head of its group. Of each group that stays the
        same number of heads must stay, since every key/value head serves equally many: of 8 heads
        in groups of 4, ``[4, 5, 6, 7]`` (a whole group) and ``[0, 1, 4, 7]`` (two of each) can go,
        ``[0]`` cannot. Where that is too narrow, gate the head with `head_mask` instead.

        References
        ----------
        Michel et al. 2019, section 2.3; Voita et al. 2019, section 5.
        """
        gone = _checks.chosen("heads", heads, self.num_heads)
        if gone is None:
            raise TypeError("heads is None; expected an int, a slice, or ints or bools")
        kept = np.delete(np.arange(self.num_heads), gone)
        kv_kept = self._kv_heads_of(kept)
        sizes = self._sizes.arguments() | {"num_heads": len(kept), "num_kv_heads": len(kv_kept)}
        smaller = type(self)(
            **sizes,
            bias=self.b_Q is not None,
            out_bias=self.b_O is not None,
            dtype=self.dtype,
            init="zeros",
            position=self.position,
        )
        parts = {"W_Q": kept, "b_Q": kept, "W_O": kept, "b_O": slice(None)}
        parts |= dict.fromkeys(("W_K", "b_K", "W_V", "b_V"), kv_kept)
        for name, which in parts.items():
            mine = getattr(self, name)
            if mine is not None:
                getattr(smaller, name)[...] = mine[which]
        return smaller

    # ---- below the surface --------------------------------------------------------------------

    @property
    def _sizes(self) -> LayerSizes:
        return self._parameters.sizes

    def _check_out(self, out: Any, token_shape: tuple[int, ...]) -> None:
        """Check the array, if there is one, that is to receive the result of so many tokens."""
        if out is not None:
            _checks.result("out", out, (*token_shape, self.embed_dim), self.dtype, "the layer")

    @classmethod
    def _from_tensors(
        cls,
        tensors: Mapping[str, ArrayLike] | Module,
        style: str,
        num_heads: int | None,
        prefix: str,
        dtype: npt.DTypeLike | None,
        position: Position | None,
    ) -> Self:
        theirs = _weights.read(tensors, style, prefix)
        sizes = _weights.sizes_of(theirs, _weights.number_of_heads(tensors, num_heads))
        layer = cls(
            **sizes.arguments(),
            bias=theirs.biases is not None,
            out_bias=theirs.out_bias is not None,
            dtype=_weights.dtype_of(theirs) if dtype is None else dtype,
            init="zeros",
            position=position,
        )
        layer._parameters.write(theirs)
        return layer

    def _put_in_position(
        self, heads: list[Array], query_positions: Array, key_positions: Array | None = None
    ) -> None:
        for which, positions in ((QUERY, query_positions), (KEY, key_positions)):
            heads[which] = _inputs.in_position(self.position, heads[which], positions)

    def _kv_heads_of(self, kept: Array) -> Array:
        """Key/value heads that the kept query heads read, each equally often."""
        if not len(kept):
            return kept
        group = self.num_heads // self.num_kv_heads
        readers = np.bincount(kept // group, minlength=self.num_kv_heads)
        stay = np.flatnonzero(readers)
        if len(set(readers[stay].tolist())) > 1:
            raise ValueError(
                f"heads leaves {readers[stay].tolist()} query heads to the key/value heads "
                f"{stay.tolist()}; expected the same number for each that stays"
            )
        return stay


def _attend_cached(
    cache: KVCache, heads: list[Array], options: dict[str, Any]
) -> Array | tuple[Array, Array]:
    """Append and attend; where the second fails the first is undone."""
    query, key, value = heads
    before = cache.lengths
    cache.append(key, value, options["counts"])
    try:
        return cache.attend(query, **options)
    except BaseException:
        cache._take_back(before)
        raise
