"""Arrays of answers as numpy arrays. numpy is imported only here, because the package works without it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ._errors import UnsupportedError

if TYPE_CHECKING:
    from ._native import Array


def to_numpy(array: Array) -> Any:
    """The array's memory as a numpy array; bf16 needs ml_dtypes."""
    try:
        import numpy
    except ImportError as error:
        raise UnsupportedError("numpy is not installed; pip install numpy, or use memoryview(rows)") from error
    if array.dtype != "bf16":
        return numpy.asarray(array)
    try:
        import ml_dtypes
    except ImportError as error:
        raise UnsupportedError(
            "numpy has no bf16 of its own; pip install ml_dtypes, use torch.from_dlpack(rows), or rows.view('u16')"
        ) from error
    return numpy.asarray(array.view("u16")).view(ml_dtypes.bfloat16)


def as_array(array: Array, dtype: Any, copy: bool | None) -> Any:
    """What numpy's `__array__` protocol wants."""
    own = to_numpy(array)
    if dtype is not None and dtype != own.dtype:
        if copy is False:
            raise ValueError(f"elements of {own.dtype} cannot become {dtype} without a copy")
        return own.astype(dtype)
    return own.copy() if copy else own
