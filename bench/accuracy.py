"""Check a result against float64 before its time is worth anything.

Only some query rows are checked, because the float64 reference writes out all scores; but they are
checked in every head of every sequence.
"""

from dataclasses import dataclass

import numpy as np

import mha_fast.reference

from .cases import Case, Inputs

N_ROW = 16  # per head, the first and the last always among them

# The bound tells a wrong result from a right one, not a good rounding error from a bad one: the
# cases here are off by one or two roundings of the largest value, a wrong mask by thousands.
BOUND_IN_ROUNDINGS = 16

# precision="high" multiplies with 16 bits of a float32: its roundings are 2**7 times as large.
ROUNDING_OF = {"highest": 1, "high": 128}

_EPS_16_BIT = {"float16": 2.0**-10, "bfloat16": 2.0**-7}


class WrongResult(Exception):
    """A result is too far from the float64 one to be timed."""


@dataclass(frozen=True)
class Expected:
    """Some rows of the right answer."""

    rows: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]
    bound: np.ndarray  # of each row

    def error_of(self, result: np.ndarray, precision: str = "highest") -> float:
        """Largest absolute error of `result` in the rows.

        Raises
        ------
        WrongResult
            The shape differs, or an error is above the bound of its row or not a number.
        """
        if result.shape != self.shape:
            raise WrongResult(f"result has shape {result.shape}; expected {self.shape}")
        sampled = result[..., self.rows, :].astype(np.float64)
        error = np.abs(sampled - self.values)
        bound = self.bound * ROUNDING_OF[precision]
        if not np.all(error <= bound):  # also true when the error is NaN
            worst = np.unravel_index(np.argmax(error / bound), error.shape)
            limit = np.broadcast_to(bound, error.shape)[worst]
            raise WrongResult(f"error {error[worst]:.2g} against float64 exceeds {limit:.2g}")
        return float(error.max())


def expected_rows(case: Case, inputs: Inputs) -> Expected:
    """Compute the rows to check of `case` in float64."""
    rows = np.unique(np.linspace(0, case.n_query - 1, N_ROW).astype(int))
    values = mha_fast.reference.attention(
        inputs.query[..., rows, :],
        inputs.key,
        inputs.value,
        _mask_of_rows(case, inputs.attn_mask, rows),
    )
    bound = BOUND_IN_ROUNDINGS * _rounding(case.dtype, inputs.value, values)
    return Expected(rows, values, inputs.query.shape, bound)


def _rounding(dtype, value, right):
    arithmetic = np.float64 if dtype == "float64" else np.float32
    largest = np.abs(right).max(axis=-1, keepdims=True)  # of each row
    rounding = np.full_like(largest, np.finfo(arithmetic).eps * float(np.abs(value).max()))
    # A mean of many values is smaller than one rounding of the largest of them to 16 bits. But it
    # is weights and results that are rounded to 16 bits, in proportion to the result.
    return rounding + _EPS_16_BIT.get(dtype, 0) * largest


def _mask_of_rows(case, attn_mask, rows):
    # The reference sees the sampled rows as rows 0, 1, 2, ...: what the mask says about the
    # real rows, and the causal rule, must be cut to them here.
    if attn_mask is not None and attn_mask.shape[-2] != 1:
        attn_mask = attn_mask[..., rows, :]
    if not case.is_causal:
        return attn_mask
    not_after = np.arange(case.n_key) <= rows[:, None]
    if attn_mask is None:
        return not_after
    if attn_mask.dtype == np.bool_:
        return attn_mask & not_after
    return np.where(not_after, attn_mask, -np.inf)
