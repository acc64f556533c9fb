"""Names for the types in signatures."""

from typing import Any, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
ArrayLike: TypeAlias = npt.ArrayLike
# What picks some of an axis.
Index: TypeAlias = int | slice | npt.ArrayLike
Window: TypeAlias = tuple[int | None, int | None]
