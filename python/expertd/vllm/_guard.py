"""Checks of calls before vLLM gives out what a step computed.

Replays of CUDA graphs raise nothing, and a call that failed leaves NaN, from which vLLM samples tokens. So every method that hands a step's
results to the engine is followed by a check. These methods have waited for the GPU, and a failed call is known by then. An exception ends
the engine, as any exception of a step does, and vLLM ends its requests with an error.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable
from typing import Any

# Module, class and methods. Workers return results of steps that they have waited for, unless they schedule asynchronously: then a
# thread asks for the results. Both of vLLM's model runners have classes of results.
_OUTPUTS = (
    ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens")),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput", ("get_output",)),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUPoolingModelRunnerOutput", ("get_output",)),
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", ("get_output",)),
    ("vllm.v1.worker.gpu.async_utils", "AsyncPoolingOutput", ("get_output",)),
)
# A method of the package has this attribute.
_MARK = "_expertd_check"

logger = logging.getLogger(f"vllm.{__name__}")


def guard_outputs(check: Callable[[], None]) -> bool:
    """Has `check` called after each method that gives out a step's results. False, and nothing is done, if vLLM lacks one of them."""
    found: list[tuple[type, str]] = []
    for module, name, methods in _OUTPUTS:
        try:
            owner = getattr(importlib.import_module(module), name)
            found += [(owner, method) for method in methods if callable(getattr(owner, method))]
        except (ImportError, AttributeError) as error:
            logger.warning(
                "expertd cannot check the results of steps, because this vLLM differs (%s). If a call fails in a CUDA graph, the process ends.",
                error,
            )
            return False
    for owner, method in found:
        original = getattr(owner, method)
        if getattr(original, _MARK, None) is None:
            setattr(owner, method, _checked(original, check))
    return True


def _checked(original: Any, check: Callable[[], None]) -> Any:
    @functools.wraps(original)
    def checked(*args: Any, **kwargs: Any) -> Any:
        try:
            output = original(*args, **kwargs)
        except Exception:
            # Rows that are NaN may make the step itself fail; the exception of the call has the cause.
            check()
            raise
        check()
        return output

    setattr(checked, _MARK, check)
    return checked
