"""What `head_statistics` returns, from the kernel and from the reference alike."""

from dataclasses import dataclass

from ._typing import Array

__all__ = ["HeadStatistics"]


@dataclass(frozen=True, eq=False, repr=False)
class HeadStatistics:
    """What each head of one attention layer looks at, measured on one input.

    P is the matrix of attention weights of one head: softmax of the scores after every mask, a
    sink counted in its denominator. i is a query, ``p_i = query_offset + i`` its position on the
    axis of the keys, j a key. "Mean" is the mean over the queries that have a key with a score
    above -inf; where a head has no such query, its means are NaN. A NaN among the scores of a
    query makes every mean of that head NaN.

    Attributes
    ----------
    entropy : float64 array, (..., n_head)
        Mean of ``-sum_j P_ij ln P_ij``, in nats, with ``0 ln 0 = 0`` [1]_. Between 0 (one key has
        all the weight) and ``ln n_key`` (all have the same).
    confidence : float64 array, (..., n_head)
        Mean of ``max_j P_ij`` over the keys that are not ignored [2]_; 0 for a query that sees
        only ignored keys.
    mean_distance : float64 array, (..., n_head)
        Mean of ``sum_j P_ij |p_i - j|``, in positions.
    offset_mass : float64 array, (..., n_head, n_offset)
        Mean of ``P[i, p_i + d]`` for each offset d [1]_; 0 where there is no such key.
    offset_argmax : float64 array, (..., n_head, n_offset)
        Share of the queries whose `top_key` is ``p_i + d`` [2]_.
    key_mass : float64 array, (..., n_head, n_set), or None
        Mean of the weight on each set of keys [1]_. None when no sets were asked for.
    top_key : int64 array, (..., n_head, n_query)
        The key of the largest weight, ignored ones included, the lowest of those that tie [1]_.
        -1 where the query has no key or a NaN among its scores.
    received : float64 array, (..., n_head, n_key), or None
        ``sum_i P_ij``, the weight that each key gets from all queries together [3]_. None when it
        was not asked for.
    offsets : tuple of int
        The offsets d, in the order of `offset_mass` and `offset_argmax`.

    Notes
    -----
    Where query and key have two axes, `n_head` and its axis are absent.

    Padding among the *queries* counts like any other query. A bool mask that is False on their
    whole rows leaves them without a key, and so out of the means.

    References
    ----------
    .. [1] K. Clark, U. Khandelwal, O. Levy, C. Manning: What Does BERT Look At? An Analysis of
       BERT's Attention. BlackboxNLP 2019, sections 3 and 4.
    .. [2] E. Voita, D. Talbot, F. Moiseev, R. Sennrich, I. Titov: Analyzing Multi-Head
       Self-Attention: Specialized Heads Do the Heavy Lifting, the Rest Can Be Pruned. ACL 2019,
       sections 4 and 5.1.
    .. [3] Z. Zhang et al.: H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large
       Language Models. NeurIPS 2023, section 4.
    """

    entropy: Array
    confidence: Array
    mean_distance: Array
    offset_mass: Array
    offset_argmax: Array
    key_mass: Array | None
    top_key: Array
    received: Array | None
    offsets: tuple[int, ...]

    def __repr__(self) -> str:
        """Sizes only: the arrays of a batch would fill the screen."""
        *batch_and_head, n_query = self.top_key.shape
        parts = [f"shape={tuple(batch_and_head)}", f"n_query={n_query}", f"offsets={self.offsets}"]
        if self.key_mass is not None:
            parts.append(f"n_set={self.key_mass.shape[-1]}")
        if self.received is not None:
            parts.append(f"n_key={self.received.shape[-1]}")
        return f"HeadStatistics({', '.join(parts)})"
