"""The native half of `Client` with `session="cuda"`: calls on CUDA tensors.

A call is work of torch's current stream: a copy into the session's memory, memory operations that start the call and wait for its end,
and a copy out of it. The host waits for none of them.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
from torch.utils.dlpack import from_dlpack  # type: ignore[import-not-found, unused-ignore]

from ._cuda_session import DTYPES, LANES, CudaAnswer, CudaSession, Kind, Lane, Routing
from ._errors import ConnectError, NotFoundError, UnavailableError, UnsupportedError
from ._native import NativeClient

if TYPE_CHECKING:
    from ._client import RetryPolicy
    from ._native import Model, ModelSummary, NativeStream


def require_gpu() -> None:
    """Raises UnsupportedError if torch sees no GPU in this process."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            'session="cuda": torch sees no GPU in this process (torch.cuda.is_available() is False); pass session="host" to a '
            "service on this host, or leave session out"
        )


class CudaRoute:
    """The native half of `Client` with `session="cuda"`."""

    def __init__(self, address: str, retry: RetryPolicy | None) -> None:
        require_gpu()
        self.address = address
        self.retry = retry
        # Answers for the model; it opens no session.
        self._host = NativeClient([address], False, True, retry, None)
        self._lanes: dict[int, tuple[Lane, ...]] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()

    def connect(self) -> None:
        try:
            self._host.model("")
        except UnavailableError as error:
            raise ConnectError(str(error)) from error

    def model(self, name: str) -> Model:
        return self._host.model(name)

    def models(self) -> list[ModelSummary]:
        return self._host.models()

    def stream(self, capacity: int) -> NativeStream:
        raise UnsupportedError('session="cuda" has no streams of calls; make calls on several CUDA streams instead')

    def synchronize(self) -> None:
        """Waits for the GPUs and raises the exception of a call that failed."""
        for lanes in list(self._lanes.values()):
            lanes[0].session.synchronize()

    def forward(self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any], out: Any = None) -> CudaAnswer:
        tensor = _tensor(rows, "rows")
        if tensor.dim() != 2:
            raise ValueError(f"rows has shape {list(tensor.shape)}; expected [tokens, hidden]")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"rows have elements of {tensor.dtype}; expected bfloat16, float16 or float32")
        if options["dtype"] not in (None, DTYPES[tensor.dtype]):
            raise TypeError(f"rows have elements of {tensor.dtype}, and dtype says {options['dtype']!r}; leave dtype out")
        routing = _routing(options, tensor)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is {seconds}; expected a positive number of seconds, or None for no limit")
        if torch.cuda.current_device() == tensor.device.index:
            return self._enqueue(layer, tensor, routing, seconds, options, out)
        with torch.cuda.device(tensor.device):
            return self._enqueue(layer, tensor, routing, seconds, options, out)

    def _enqueue(
        self, layer: int, tensor: Tensor, routing: Routing, seconds: float | None, options: dict[str, Any], out: Any
    ) -> CudaAnswer:
        """A call on the current stream of the current device, which is that of `tensor`."""
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format) if out is None else _checked_output(out, tensor)
        capturing = torch.cuda.is_current_stream_capturing()
        lane = self._of(tensor.device, capturing)[1 if capturing else 0]
        session, served = lane.session, lane.session.served
        if options["model"] not in ("", served.name):
            raise NotFoundError(f"the service has no model {options['model']!r}; it serves {served.name!r}", code="NOT_FOUND")
        if tensor.shape[1] != served.hidden:
            raise ValueError(f"rows have {tensor.shape[1]} elements each; the model's hidden size is {served.hidden}")
        if tensor.shape[0] == 0:
            raise ValueError("rows has no rows; a session's call needs at least one")
        try:
            session.native.check()
            if capturing:
                session.native.keep()
            kind = Kind(
                dtype=tensor.dtype,
                shared_experts=options["shared_experts"] == "include",
                version=options["expected_weight_version"],
                timeout_us=0 if seconds is None else max(int(seconds * 1e6), 1),
                given_k=0 if routing.ids is None else routing.ids.shape[1],
                return_routing=options["return_routing"],
                token_ids=routing.token_ids is not None,
            )
            prepared = lane.prepare(layer, kind)
            return lane.forward(tensor, routing, out, prepared, kind.return_routing, ordered=not capturing)
        except UnavailableError:
            self._forget(session)
            raise

    def _of(self, device: torch.device, capturing: bool) -> tuple[Lane, ...]:
        """The lanes of the session on a GPU; opens one if there is none, or the last one has ended."""
        index = device.index
        found = self._lanes.get(index)
        if found is not None:
            return found
        if capturing:
            raise UnsupportedError(
                "a CUDA graph cannot capture the opening of a session; make one call of this client before the capture begins"
            )
        with self._lock:
            if index not in self._lanes:
                session = self._open(device, retry=index in self._ended)
                with torch.cuda.device(device):
                    self._lanes[index] = tuple(Lane(session, doorbell) for doorbell in range(LANES))
            return self._lanes[index]

    def _open(self, device: torch.device, retry: bool) -> CudaSession:
        policy = self.retry if retry else None
        start, attempt = time.monotonic(), 1
        while True:
            try:
                return CudaSession(self.address, device, self._host.model(""))
            except (ConnectError, UnavailableError):
                pause = min(0.05 * 2 ** min(attempt - 1, 10), policy.max_pause) if policy else 0.0
                over = policy is None or attempt >= policy.max_attempts
                if over or (policy and time.monotonic() + pause - start > policy.max_elapsed):
                    raise
                time.sleep(pause)
                attempt += 1

    def _forget(self, session: CudaSession) -> None:
        """Lets the next call open another session, if this one has ended."""
        if not session.native.has_ended():
            return
        with self._lock:
            index = session.device.index
            if index in self._lanes and self._lanes[index][0].session is session:
                del self._lanes[index]
                self._ended.add(index)


def _tensor(rows: Any, what: str) -> Tensor:
    tensor = rows if isinstance(rows, Tensor) else from_dlpack(rows) if hasattr(rows, "__dlpack__") else None
    if tensor is None or not tensor.is_cuda:
        found = type(rows).__name__ if tensor is None else f"a tensor on {tensor.device}"
        raise TypeError(
            f'{what} is {found}; with session="cuda" it must be on a GPU: pass {what}.cuda(), or use a client with session="host"'
        )
    return tensor.detach()


def _routing(options: dict[str, Any], rows: Tensor) -> Routing:
    """The routing and token ids of a call, on the GPU of its rows."""
    ids, weights, token_ids = (options[name] for name in ("topk_ids", "topk_weights", "token_ids"))
    if (ids is None) != (weights is None):
        raise ValueError("topk_ids and topk_weights belong together: pass both, or neither to let the service run the gate")
    tokens = rows.shape[0]
    if ids is not None:
        ids, weights = _integers(ids, "topk_ids"), _tensor(weights, "topk_weights")
        if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != tokens or ids.shape[1] == 0:
            raise ValueError(
                f"topk_ids has shape {list(ids.shape)} and topk_weights {list(weights.shape)}; expected [{tokens}, k] of both"
            )
        if not weights.is_floating_point():
            raise TypeError(f"topk_weights has elements of {weights.dtype}; expected floats")
    if token_ids is not None:
        token_ids = _integers(token_ids, "token_ids")
        if token_ids.shape != (tokens,):
            raise ValueError(f"token_ids has shape {list(token_ids.shape)}; expected [{tokens}]")
    return Routing(ids, weights, token_ids)


def _integers(array: Any, what: str) -> Tensor:
    """int32 or int64. Numbers beyond int32 become others that no expert has."""
    tensor = _tensor(array, what)
    if tensor.dtype == torch.int64:
        return tensor.clamp(-(2**31), 2**31 - 1)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{what} has elements of {tensor.dtype}; expected int32 or int64")
    return tensor


def _checked_output(out: Any, rows: Tensor) -> Tensor:
    tensor = _tensor(out, "out")
    if tensor.shape != rows.shape or tensor.dtype != rows.dtype or tensor.device != rows.device:
        raise ValueError(
            f"out is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected {rows.dtype} {list(rows.shape)} on {rows.device}, "
            "as rows"
        )
    if not tensor.is_contiguous():
        raise ValueError("out is not contiguous; expected row-major memory")
    return tensor
