"""Checks of calls before vLLM gives out what a step computed. An exception ends the engine, and vLLM ends its requests with an error."""

from __future__ import annotations

from collections.abc import Callable

from .._engines.guard import checked, replace

# Module, class and methods. Workers return results of steps that they have waited for, unless they schedule asynchronously: then a
# thread asks for the results. Both of vLLM's model runners have classes of results.
_OUTPUTS = (
    ("vllm.v1.worker.gpu_worker", "Worker", ("execute_model", "sample_tokens")),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUModelRunnerOutput", ("get_output",)),
    ("vllm.v1.worker.gpu_model_runner", "AsyncGPUPoolingModelRunnerOutput", ("get_output",)),
    ("vllm.v1.worker.gpu.async_utils", "AsyncOutput", ("get_output",)),
    ("vllm.v1.worker.gpu.async_utils", "AsyncPoolingOutput", ("get_output",)),
)


def guard_outputs(check: Callable[[], None]) -> bool:
    """Has `check` called after each method that gives out a step's results. False, and nothing is done, if vLLM lacks one of them."""
    return replace("vLLM", _OUTPUTS, check, checked)
