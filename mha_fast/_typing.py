"""Names for the types in signatures."""

from typing import Any, TypeAlias

import numpy.typing as npt

Array: TypeAlias = npt.NDArray[Any]
ArrayLike: TypeAlias = npt.ArrayLike
Window: TypeAlias = tuple[int | None, int | None]
