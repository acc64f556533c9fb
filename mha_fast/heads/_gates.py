"""Gates for heads that can be learned, and closed for good."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from .. import _checks
from .._typing import Array, ArrayLike
from ._tables import grid

__all__ = ["HardConcrete"]


@dataclass(frozen=True, eq=False, repr=False)
class HardConcrete:
    """Gates from the hard concrete distribution: between 0 and 1, and often exactly one of them.

    A logistic variable with location `log_alpha` is squashed to (0, 1), stretched to (low, high),
    and cut off at 0 and 1::

        gate = clip(low + (high - low) * sigmoid((logit(u) + log_alpha) / temperature), 0, 1)

    with u uniform on (0, 1). So that a gate can be learned by gradient descent, and still close.
    The result goes to `attention` as `head_mask`, which does not compute heads whose gate is 0.

    Parameters
    ----------
    log_alpha : array, (n_head,) or (n_layer, n_head)
        What is learned: large opens the gate, small closes it.
    temperature : float
        Above 0; the smaller, the closer to a mere coin toss. 2/3 in [1]_.
    low, high : float
        Ends of the stretched interval, below 0 and above 1. -0.1 and 1.1 in [1]_.

    Raises
    ------
    ValueError
        A temperature or an interval out of bounds.

    References
    ----------
    .. [1] C. Louizos, M. Welling, D. Kingma: Learning Sparse Neural Networks through L0
       Regularization. ICLR 2018, sections 2.2 and 4.
    .. [2] For heads: Voita et al. 2019, Analyzing Multi-Head Self-Attention, section 6.1.

    Examples
    --------
    >>> import numpy as np
    >>> from mha_fast.heads import HardConcrete
    >>> gates = HardConcrete(np.array([-3.0, 0.0, 3.0]))
    >>> gates.deterministic().round(3)
    array([0. , 0.5, 1. ])
    >>> round(gates.expected_l0, 3)
    2.019

    A step of training: gates for this step, and what the gradient of the loss by the gates is
    multiplied with to get that by `log_alpha`. `head_mask` among the `wanted` of
    `attention_backward` and `MultiHeadAttention.backward` is the gradient by the gates.

    >>> gate, slope = gates.sample_with_slope(np.random.default_rng(0))
    >>> gate.round(3), slope.round(3)
    (array([0.   , 0.12 , 0.431]), array([0.   , 0.27 , 0.444]))
    >>> gates.expected_l0_slope.round(3)
    array([0.159, 0.14 , 0.01 ])
    """

    log_alpha: ArrayLike
    temperature: float = 2 / 3
    low: float = -0.1
    high: float = 1.1

    def __post_init__(self) -> None:
        """Refuse what makes no distribution."""
        _checks.reals("log_alpha", self.log_alpha)
        if not self.temperature > 0:
            raise ValueError(f"temperature is {self.temperature}; expected a number above 0")
        if not (self.low < 0 and self.high > 1):
            raise ValueError(
                f"low and high are {self.low} and {self.high}; expected below 0 and above 1"
            )

    @cached_property
    def _location(self) -> Array:
        return _checks.reals("log_alpha", self.log_alpha).astype(np.float64)

    @property
    def open_probability(self) -> Array:
        """Probability that a gate is not 0, like `log_alpha`."""
        return _sigmoid(self._location - self.temperature * np.log(-self.low / self.high))

    @property
    def expected_l0(self) -> float:
        """Expected number of heads whose gate is not 0: the penalty of training."""
        return float(self.open_probability.sum())

    def sample(self, rng: np.random.Generator) -> Array:
        """Draw gates, like `log_alpha`: what training multiplies the heads by."""
        noise = rng.logistic(size=self._location.shape)
        return self._stretched((noise + self._location) / self.temperature)

    def sample_with_slope(self, rng: np.random.Generator) -> tuple[Array, Array]:
        """Draw gates like `sample`, and the derivative of each by its `log_alpha`.

        0 where the gate is cut off, at 0 or at 1. The noise is held fixed: Louizos et al. 2018,
        equation 11, Kingma and Welling 2014.
        """
        noise = rng.logistic(size=self._location.shape)
        logit = (noise + self._location) / self.temperature
        gate, share = self._stretched(logit), _sigmoid(logit)
        is_between = (gate > 0) & (gate < 1)
        slope = (self.high - self.low) * share * (1 - share) / self.temperature
        return gate, np.where(is_between, slope, 0.0)

    @property
    def expected_l0_slope(self) -> Array:
        """Derivative of `expected_l0` by each `log_alpha`."""
        return self.open_probability * (1 - self.open_probability)

    def deterministic(self) -> Array:
        """The gates to use after training, like `log_alpha`: no noise, and no temperature."""
        return self._stretched(self._location)

    def _stretched(self, logit: Array) -> Array:
        return np.clip(self.low + (self.high - self.low) * _sigmoid(logit), 0.0, 1.0)

    def __repr__(self) -> str:
        """The deterministic gates, and how many to expect open."""
        table = grid(np.atleast_1d(self.deterministic()), lambda gate: f"{gate:.2f}")
        n_open = f"{self.expected_l0:.1f} of {self._location.size}"
        return f"{table}\ngate after training; {n_open} expected open in training"


def _sigmoid(x: Array) -> Array:
    """1 / (1 + exp(-x)), by tanh, which cannot overflow."""
    return 0.5 + 0.5 * np.tanh(0.5 * x)
