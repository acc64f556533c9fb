from ._typing import Array

def attend(
    query: Array,
    key: Array,
    value: Array,
    out: Array,
    lse: Array | None,
    mask: Array | None,
    mask_type: int,
    key_length: Array | None,
    query_offset: Array | None,
    window_left: int,
    window_right: int,
    scale: float,
    softcap: float,
    alibi_slope: Array | None,
    sink: Array | None,
    gate: Array | None,
    batch_shape: tuple[int, ...],
    n_thread: int,
) -> None: ...
def built_isas() -> tuple[str, ...]: ...
def available_isas() -> tuple[str, ...]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
def has_openmp() -> bool: ...
def default_threads() -> int: ...
def measure_fma_peak(n_thread: int = 1, n_round: int = 300_000) -> float: ...
