"""KVCache: the keys and values of sequences that grow, in place and ready for attention()."""

from __future__ import annotations

from typing import Any, Literal, Self, Unpack, overload

import numpy as np
import numpy.typing as npt

from .. import _checks
from .._attention import attention
from .._checks import empty
from .._options import CACHED, CachedOptions
from .._typing import Array, ArrayLike

# Of the buffer through which `reorder` copies: small enough to stay in the processor's cache.
_BUFFER_BYTES = 1 << 20


class KVCache:
    """Keys and values of a batch of sequences, each with a length of its own.

    The arrays are allocated ahead and grow geometrically, so that appending costs as much as the
    new tokens do. `attend` reads them where they lie.

    Parameters
    ----------
    n_batch : int
        Number of sequences.
    num_kv_heads : int
        Number of key/value heads.
    head_width : int
        Width of a key.
    value_width : int, optional
        Width of a value; default `head_width`.
    dtype : dtype
        float16, bfloat16, float32 or float64. Keys, values and queries must have it.
    capacity : int
        Tokens per sequence to make room for now.

    Raises
    ------
    TypeError, ValueError
        A size that is no int or is below 0, or a dtype that is not accepted.
    MemoryError
        No memory for `capacity` tokens.

    Notes
    -----
    A call that fails, for want of memory too, leaves the cache as it was.

    Room behind the end of a sequence is never read, and never written before it is needed.
    `copy.copy`, `copy.deepcopy` and `pickle` give a cache of its own, and several threads may call
    `attend` on one cache; a call that changes the cache must run alone.

    Examples
    --------
    A prompt in two chunks, then token by token:

    >>> import numpy as np, mha_fast
    >>> rng = np.random.default_rng(0)
    >>> cache = mha_fast.KVCache(n_batch=2, num_kv_heads=4, head_width=64)
    >>> for n_token in (100, 50, 1, 1, 1):
    ...     query = rng.standard_normal((2, 8, n_token, 64), dtype=np.float32)
    ...     key, value = rng.standard_normal((2, 2, 4, n_token, 64), dtype=np.float32)
    ...     cache.append(key, value)
    ...     out = cache.attend(query)
    >>> out.shape, cache.lengths, cache.capacity
    ((2, 8, 1, 64), array([153, 153]), 200)
    """

    def __init__(
        self,
        n_batch: int,
        num_kv_heads: int,
        head_width: int,
        value_width: int | None = None,
        *,
        dtype: npt.DTypeLike = np.float32,
        capacity: int = 0,
    ) -> None:
        n_batch = _checks.size("n_batch", n_batch)
        n_kv_head = _checks.size("num_kv_heads", num_kv_heads)
        head_width = _checks.size("head_width", head_width)
        value_width = (
            head_width if value_width is None else _checks.size("value_width", value_width)
        )
        capacity, dtype = _checks.size("capacity", capacity), _checks.float_dtype(dtype)
        self._key = empty((n_batch, n_kv_head, capacity, head_width), dtype)
        self._value = empty((n_batch, n_kv_head, capacity, value_width), dtype)
        self._first = 0  # row of the first token that is kept, of all sequences
        self._dropped = np.zeros(n_batch, np.int64)  # replaced by each change, as the lengths are
        self._begun = n_batch == 0  # whether anything was ever appended
        self._lengths = np.zeros(n_batch, np.int64)  # replaced by each change, never written to

    # ---- what it holds ------------------------------------------------------------------------

    @property
    def lengths(self) -> Array:
        """Number of tokens of each sequence, (n_batch,), int64, read-only.

        A record of this moment: later calls leave it as it is, so it can be kept to
        `truncate` to.
        """
        return _read_only(self._lengths)

    @property
    def dropped(self) -> Array:
        """Number of tokens that `drop_oldest` took from each sequence, (n_batch,), read-only.

        Also the position, among all tokens there ever were, of the first one that is kept.
        """
        return _read_only(self._dropped)

    @property
    def n_batch(self) -> int:
        """Number of sequences."""
        return self._key.shape[0]

    @property
    def num_kv_heads(self) -> int:
        """Number of key/value heads."""
        return self._key.shape[1]

    @property
    def head_width(self) -> int:
        """Width of a key."""
        return self._key.shape[3]

    @property
    def value_width(self) -> int:
        """Width of a value."""
        return self._value.shape[3]

    @property
    def capacity(self) -> int:
        """Number of tokens a sequence can have before the next growth."""
        return self._key.shape[2]

    @property
    def keys(self) -> Array:
        """View of the keys, (n_batch, n_kv_head, longest length, head_width).

        Rows behind the end of a shorter sequence hold anything. Writing to the view changes the
        cache. Growth, and `reorder` to another number of sequences, move the cache elsewhere and
        leave the view behind; `drop_oldest` moves what is kept.
        """
        return self._key[:, :, self._first : self._first + self._longest]

    @property
    def values(self) -> Array:
        """View of the values, (n_batch, n_kv_head, longest length, value_width), like `keys`."""
        return self._value[:, :, self._first : self._first + self._longest]

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of keys, values and queries."""
        return self._key.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the keys and values, the room for further tokens included."""
        return self._key.nbytes + self._value.nbytes

    def __repr__(self) -> str:
        n_batch, n_kv_head, capacity, head_width = self._key.shape
        lengths = np.array2string(self._lengths, threshold=16, edgeitems=3, max_line_width=10**6)
        return (
            f"KVCache(n_batch={n_batch}, num_kv_heads={n_kv_head}, head_width={head_width}, "
            f"value_width={self._value.shape[-1]}, dtype={self.dtype}, capacity={capacity}, "
            f"lengths={lengths})"
        )

    # ---- changes ------------------------------------------------------------------------------

    def append(self, key: ArrayLike, value: ArrayLike, counts: ArrayLike | None = None) -> None:
        """Put new tokens behind the end of each sequence.

        Parameters
        ----------
        key : array, (n_batch, n_kv_head, n_token, head_width)
        value : array, (n_batch, n_kv_head, n_token, value_width)
        counts : int or int array (n_batch,), optional
            Number of new tokens of each sequence, 0 to n_token; the rows behind are padding and
            are not stored. Default: n_token for each.

        Raises
        ------
        TypeError
            A dtype other than that of the cache, or `counts` that are no integers.
        ValueError
            A shape or a count that does not fit.
        MemoryError
            No memory to grow.

        Notes
        -----
        When the capacity does not suffice it becomes twice what it was, or what is needed if
        that is more. Over many calls a token is copied about once more. Where tokens were dropped
        and at most half of the capacity is needed, what is kept moves to the front instead.
        """
        n_batch, n_kv_head, _, head_width = self._key.shape
        tokens = (n_batch, n_kv_head, "tokens")
        key = _fitting("key", key, (*tokens, head_width), self.dtype)
        value = _fitting("value", value, (*tokens, self._value.shape[3]), self.dtype)
        n_token = key.shape[2]
        if value.shape[2] != n_token:
            raise ValueError(f"value has shape {value.shape}; expected {n_token} rows to match key")
        new = self._counts(counts, n_token)
        lengths = self._lengths + new
        needed = int(lengths.max(initial=0))
        if self._first + needed > self.capacity:
            if needed <= self.capacity // 2:
                self._to_the_front()
            else:
                self._move(np.arange(n_batch), max(needed, 2 * self.capacity))
        before, after = self._first + self._lengths, self._first + lengths
        spans = list(zip(before.tolist(), after.tolist(), strict=True))
        alike = len(set(spans)) == 1  # then one copy serves the batch
        for which, (first, end) in [(slice(None), spans[0])] if alike else enumerate(spans):
            self._key[which, ..., first:end, :] = key[which, ..., : end - first, :]
            self._value[which, ..., first:end, :] = value[which, ..., : end - first, :]
        self._lengths, self._begun = lengths, True

    def truncate(self, lengths: ArrayLike) -> None:
        """Drop the tokens behind the given lengths, as after rejected speculation.

        Parameters
        ----------
        lengths : int or int array (n_batch,)
            New length of each sequence, at most the present one. 0 empties the cache.

        Raises
        ------
        TypeError
            No integers.
        ValueError
            A negative length, or one above the present length of its sequence.

        Notes
        -----
        The capacity stays. A sequence of which nothing is left begins anew: its `dropped` is 0.
        """
        new = _checks.integers("lengths", lengths, self._lengths.shape, 0, self._longest)
        too_long = np.flatnonzero(new > self._lengths)
        if too_long.size:
            i = too_long[0]
            raise ValueError(
                f"lengths holds {new[i]} for sequence {i}; expected at most {self._lengths[i]}, "
                "its present length"
            )
        self._lengths = new.copy()  # it may be the array of the caller
        self._dropped = np.where(new == 0, 0, self._dropped)

    def drop_oldest(self, counts: ArrayLike) -> None:
        """Forget the first tokens of each sequence, as when a window has passed them.

        Parameters
        ----------
        counts : int or int array (n_batch,)
            How many tokens each sequence loses, at most its length.

        Raises
        ------
        TypeError
            No integers.
        ValueError
            A negative count, or one above the length of its sequence.
        MemoryError
            No memory for a buffer of at most a megabyte.

        Notes
        -----
        `attend` then counts positions from the first token that is kept, which changes nothing in
        what causal limits, windows and ALiBi do. Masks are those of the kept tokens. A layer goes on
        counting the positions that its `position` gets: it adds `dropped`.

        What all sequences lose costs nothing now, and over many calls one more copy of each token;
        what some lose more than others moves their kept tokens. So decoding with a window takes
        memory for at most four windows, however long it goes on::

            cache.append(key, value)
            out = cache.attend(query, window=(window, 0))
            cache.drop_oldest(np.maximum(cache.lengths - window, 0))

        Examples
        --------
        >>> import numpy as np, mha_fast
        >>> cache = mha_fast.KVCache(n_batch=2, num_kv_heads=1, head_width=8)
        >>> for _ in range(1000):
        ...     token = np.ones((2, 1, 1, 8), np.float32)
        ...     cache.append(token, token)
        ...     cache.drop_oldest(np.maximum(cache.lengths - 16, 0))
        >>> cache.lengths, cache.dropped, cache.capacity
        (array([16, 16]), array([984, 984]), 64)
        """
        gone = _checks.integers("counts", counts, self._lengths.shape, 0, self._longest)
        too_many = np.flatnonzero(gone > self._lengths)
        if too_many.size:
            i = too_many[0]
            raise ValueError(
                f"counts holds {gone[i]} for sequence {i}; expected at most {self._lengths[i]}, "
                "its length"
            )
        lengths = self._lengths - gone
        shared = int(gone.min(initial=int(gone.max(initial=0))))
        more = np.flatnonzero(gone > shared)  # what these keep moves up to where the others begin
        place = np.full(len(more), self._first + shared)
        self._copy_rows(
            more.tolist(), more.tolist(), lengths[more], self._first + gone[more], place
        )
        self._first = self._first + shared if lengths.any() else 0
        self._lengths, self._dropped = lengths, self._dropped + gone

    def reorder(self, indices: ArrayLike) -> None:
        """Let sequence ``i`` become what sequence ``indices[i]`` is now, as in beam search.

        Parameters
        ----------
        indices : int array, (new n_batch,)
            Each 0 to n_batch - 1; any of them repeated or left out.

        Raises
        ------
        TypeError
            No integers.
        ValueError
            No vector, or an index out of range.
        MemoryError
            No memory for a cache of another number of sequences.

        Notes
        -----
        With as many indices as sequences, only the sequences that change are copied, in place
        and through a buffer of fixed size. Another number makes new arrays of the same capacity:
        it spreads each prompt to its beams, ``np.repeat(np.arange(n_batch), n_beam)``, or drops
        sequences that have ended.
        """
        sources = _checks.array("indices", indices)
        if sources.ndim != 1:
            raise ValueError(f"indices has shape {sources.shape}; expected one axis")
        n_batch = len(self._lengths)
        sources = _checks.integers("indices", sources, sources.shape, 0, n_batch - 1)
        lengths, dropped = self._lengths[sources], self._dropped[sources]
        if len(sources) == n_batch:
            self._exchange(sources)
        else:
            self._move(sources, self.capacity)
        self._lengths, self._dropped = lengths, dropped

    # ---- attention ----------------------------------------------------------------------------

    @overload
    def attend(
        self,
        query: ArrayLike,
        attn_mask: ArrayLike | None = ...,
        *,
        counts: ArrayLike | None = ...,
        is_causal: bool = ...,
        return_lse: Literal[False] = ...,
        **options: Unpack[CachedOptions],
    ) -> Array: ...

    @overload
    def attend(
        self,
        query: ArrayLike,
        attn_mask: ArrayLike | None = ...,
        *,
        counts: ArrayLike | None = ...,
        is_causal: bool = ...,
        return_lse: Literal[True],
        **options: Unpack[CachedOptions],
    ) -> tuple[Array, Array]: ...

    @overload
    def attend(
        self,
        query: ArrayLike,
        attn_mask: ArrayLike | None = ...,
        *,
        counts: ArrayLike | None = ...,
        is_causal: bool = ...,
        return_lse: bool,
        **options: Unpack[CachedOptions],
    ) -> Array | tuple[Array, Array]: ...

    @CACHED.shown
    def attend(
        self,
        query: ArrayLike,
        attn_mask: ArrayLike | None = None,
        *,
        counts: ArrayLike | None = None,
        is_causal: bool = True,
        return_lse: bool = False,
        **options: Unpack[CachedOptions],
    ) -> Array | tuple[Array, Array]:
        """Attention of the newest tokens to all tokens of their sequence.

        The queries of a sequence belong to its last tokens, so append these first. Query ``i`` of
        ``n`` is at position ``length - n + i``.

        Parameters
        ----------
        query : array, (n_batch, n_head, n_query, head_width)
            Dtype of the cache. `n_head` must be a multiple of `n_kv_head`.
        attn_mask : array, optional
            Broadcastable to (n_batch, n_head, n_query, longest length).
        counts : int or int array (n_batch,), optional
            Number of queries of each sequence, 0 to n_query, as `append` took it: the first rows
            are the queries, the rows behind are padding, which gets output 0 and lse -inf.
            Default: n_query for each.
        is_causal : bool
            A token sees itself and what comes before it: right for single tokens and for chunks
            of any size. False lets every query see its whole sequence, as in cross-attention.
        out : array, (n_batch, n_head, n_query, value_width), optional
            Receives the result.
        window, scale, softcap, alibi_slopes, sinks, head_mask, return_lse, precision, num_threads
            As in `attention`.

        Returns
        -------
        out : array, (n_batch, n_head, n_query, value_width)
            0 where a sequence has no token.
        lse : array, (n_batch, n_head, n_query)
            With `return_lse`: as in `attention`.

        Raises
        ------
        TypeError
            A dtype other than that of the cache, or what `attention` does not accept.
        ValueError
            A shape or a count that does not fit, or what `attention` does not accept; a cache that
            never got a token.
        MemoryError
            No memory for the result or the workspace.

        Notes
        -----
        Keys and values are not copied. Time is that of `attention` with the lengths of the
        sequences, padding included.
        """
        CACHED.check_names(options)
        if not self._begun:
            raise ValueError(
                "the cache has never got a token; append the keys and values of query first"
            )
        n_batch, _, _, head_width = self._key.shape
        query = _fitting("query", query, (n_batch, "heads", "queries", head_width), self.dtype)
        n_query = query.shape[2]
        n_real = self._counts(counts, n_query)
        result = attention(
            query,
            self.keys,
            self.values,
            attn_mask,
            is_causal=is_causal,
            query_offset=self._lengths - n_real,
            kv_lengths=self._lengths,
            return_lse=return_lse,
            **options,
        )
        if counts is not None:
            padding = np.arange(n_query) >= n_real[:, None]
            rows, lse = result if isinstance(result, tuple) else (result, None)
            rows.swapaxes(1, 2)[padding] = 0
            if lse is not None:
                lse.swapaxes(1, 2)[padding] = -np.inf
        return result

    # ---- below the surface --------------------------------------------------------------------

    @property
    def _longest(self) -> int:
        return int(self._lengths.max(initial=0))

    def _counts(self, counts: ArrayLike | None, n_row: int) -> Array:
        """Real rows of each sequence, of the `n_row` that came."""
        if counts is None:
            counts = n_row
        return _checks.integers("counts", counts, self._lengths.shape, 0, n_row)

    def _move(self, sources: Array, capacity: int) -> None:
        """Let sequence i be a copy of sequence sources[i], in new arrays of the given capacity."""
        old = (self._key, self._value)
        new = [empty((len(sources), x.shape[1], capacity, x.shape[3]), x.dtype) for x in old]
        for before, after in zip(old, new, strict=True):
            for target, source in enumerate(sources.tolist()):
                n_token = self._lengths[source]
                rows = slice(self._first, self._first + n_token)
                after[target, :, :n_token] = before[source, :, rows]
        self._key, self._value = new
        self._first = 0

    def _copy_rows(
        self, targets: list[int], sources: list[int], lengths: Array, begins: Array, places: Array
    ) -> None:
        """Copy the rows of sequence sources[i] from begins[i] on to places[i] of targets[i].

        In place: sequences may swap, and what moves within one goes to the front. The same rows of
        all are read before any is written.
        """
        longest = int(lengths.max(initial=0))
        moves = list(
            zip(targets, sources, lengths.tolist(), begins.tolist(), places.tolist(), strict=True)
        )
        arrays = (self._key, self._value)
        buffers = [_buffer(x, len(moves), longest) for x in arrays]
        for array, buffer in zip(arrays, buffers, strict=True):
            step = buffer.shape[2]
            for start in range(0, longest, step):
                counts = [min(max(n - start, 0), step) for _, _, n, _, _ in moves]
                for i, (_, source, _, begin, _) in enumerate(moves):
                    row = begin + start
                    buffer[i, :, : counts[i]] = array[source, :, row : row + counts[i]]
                for i, (target, _, _, _, place) in enumerate(moves):
                    row = place + start
                    array[target, :, row : row + counts[i]] = buffer[i, :, : counts[i]]

    def _exchange(self, sources: Array) -> None:
        """Let sequence i be a copy of sequence sources[i], in place."""
        targets = np.flatnonzero(sources != np.arange(len(sources)))
        sources = sources[targets]
        first = np.full(len(targets), self._first)
        lengths = self._lengths[sources]
        self._copy_rows(targets.tolist(), sources.tolist(), lengths, first, first)

    def _to_the_front(self) -> None:
        """Let the kept tokens begin at row 0."""
        all_of_them = list(range(self.n_batch))
        first = np.full(self.n_batch, self._first)
        self._copy_rows(all_of_them, all_of_them, self._lengths, first, np.zeros_like(first))
        self._first = 0

    def _take_back(self, lengths: Array) -> None:
        """Forget what was appended since the sequences had these lengths."""
        self._lengths = lengths

    # ---- copies -------------------------------------------------------------------------------

    def __copy__(self) -> Self:
        """Make a cache of its own: one that shared memory would be changed by this one's tokens."""
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__)
        other._move(np.arange(self.n_batch), self.capacity)
        return other

    def __getstate__(self) -> dict[str, Any]:
        """What is kept, without the memory around it."""
        state = {**self.__dict__, "_capacity": self.capacity, "_first": 0}
        behind = np.arange(self._longest) >= self._lengths[:, None]
        for name, rows in (("_key", self.keys), ("_value", self.values)):
            state[name] = np.where(behind[:, None, :, None], np.zeros((), self.dtype), rows)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make room as there was."""
        capacity = state.pop("_capacity")
        self.__dict__.update(state)
        self._move(np.arange(self.n_batch), capacity)


def _read_only(numbers: Array) -> Array:
    view = numbers.view()
    view.flags.writeable = False
    return view


def _buffer(array: Array, n_sequence: int, longest: int) -> Array:
    """Room for some rows of `n_sequence` sequences, at least one and at most `longest`."""
    _, n_kv_head, _, width = array.shape
    one_row = max(n_sequence * n_kv_head * width * array.itemsize, 1)
    n_row = max(min(_BUFFER_BYTES // one_row, longest), 1)
    return empty((n_sequence, n_kv_head, n_row, width), array.dtype)


# ---- checks -----------------------------------------------------------------------------------


def _fitting(name: str, x: Any, shape: tuple[int | str, ...], dtype: np.dtype[Any]) -> Array:
    """Return `x` as an array; a word in `shape` stands for any number."""
    array = _checks.array(name, x)
    if array.dtype != dtype:
        raise TypeError(f"{name} has dtype {array.dtype}; expected {dtype} like the cache")
    fits = len(array.shape) == len(shape) and all(
        isinstance(expected, str) or n == expected
        for n, expected in zip(array.shape, shape, strict=True)
    )
    if not fits:
        expected = ", ".join(map(str, shape))
        raise ValueError(f"{name} has shape {array.shape}; expected ({expected})")
    return array
