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


class WrongResult(Exception):
    """A result is too far from the float64 one to be timed."""


@dataclass(frozen=True)
class Expected:
    """Some rows of the right answer."""

    rows: np.ndarray
    values: np.ndarray
    shape: tuple[int, ...]
    bound: float

    def error_of(self, result: np.ndarray) -> float:
        """Largest absolute error of `result` in the rows.

        Raises
        ------
        WrongResult
            The shape differs, or the error is above the bound or not a number.
        """
        if result.shape != self.shape:
            raise WrongResult(f"result has shape {result.shape}; expected {self.shape}")
        sampled = result[..., self.rows, :].astype(np.float64)
        error = float(np.abs(sampled - self.values).max())
        if not error <= self.bound:  # also true when the error is NaN
            raise WrongResult(f"error {error:.2g} against float64 exceeds {self.bound:.2g}")
        return error


def expected_rows(case: Case, inputs: Inputs) -> Expected:
    """Compute the rows to check of `case` in float64."""
    rows = np.unique(np.linspace(0, case.n_query - 1, N_ROW).astype(int))
    values = mha_fast.reference.attention(
        inputs.query[..., rows, :],
        inputs.key,
        inputs.value,
        _mask_of_rows(case, inputs.attn_mask, rows),
    )
    rounding = np.finfo(case.dtype).eps * np.abs(inputs.value).max()
    return Expected(rows, values, inputs.query.shape, BOUND_IN_ROUNDINGS * float(rounding))


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
