"""Calls on CUDA tensors, through sessions whose memory lies on the tensors' GPU.

A call is work of torch's current stream: a copy into the session's memory, memory operations that start the call and wait for its end,
and a copy out of it. The host waits for none of them.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]

from ._errors import ConnectError, NotFoundError, UnavailableError, UnsupportedError
from ._native import NativeClient, NativeCudaSession, NativePrepared

if TYPE_CHECKING:
    from ._client import RetryPolicy
    from ._native import Model, ModelSummary, NativeStream, Receipt

# Memory of a lane for rows, in bytes; as much again is for outputs. Calls with more rows are split.
_AREA_BYTES = 32 << 20
_ALIGN = 64
# One lane for calls, and one for those that graphs capture, because nothing orders replays of graphs and other calls.
_LANES = 2
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Value of a completion word once the output is complete.
_DONE = 1
# Arguments of `forward` that prepared calls do not have.
_UNSUPPORTED = ("topk_ids", "topk_weights", "token_ids", "return_routing", "return_timings", "dtype")


def require_gpu() -> None:
    """Raises UnsupportedError if torch sees no GPU in this process."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            'session="cuda": torch sees no GPU in this process (torch.cuda.is_available() is False); pass session="host" to a '
            "service on this host, or leave session out"
        )


@dataclass(frozen=True)
class CudaAnswer:
    """The result of a call on a CUDA tensor. The GPU may still be computing it.

    Attributes:
        rows: `[tokens, hidden]` on the GPU, in the dtype of the request's rows; work of the same stream finds them complete. NaN if
            the call failed.
    """

    rows: Tensor
    _lane: _Lane
    _number: int | None

    @property
    def receipt(self) -> Receipt | None:
        """Waits for the GPU and returns the record of the call; of its last part if it was split. None if the same client made another
        call meanwhile, or a graph captured the call.

        Raises the exception of a call that failed.
        """
        self._lane.session.synchronize()
        ended, receipt = self._lane.session.native.last(self._lane.doorbell)
        return receipt if ended == self._number else None


class _Lane:
    """A doorbell with its places in the session's memory. Its calls follow one another."""

    def __init__(self, session: _Session, doorbell: int) -> None:
        self.session = session
        self.doorbell = doorbell
        self.rows_at = 2 * session.area * doorbell
        self.output_at = self.rows_at + session.area
        self.words = torch.from_dlpack(session.native.words(doorbell))
        self.prepared: dict[Any, tuple[NativePrepared, Tensor, Tensor]] = {}
        self.lock = threading.Lock()
        self.event = torch.cuda.Event()
        # The stream of the last call.
        self.stream: torch.cuda.Stream | None = None
        self.calls = 0

    def place(self, offset: int, dtype: torch.dtype) -> Tensor:
        """The rows `[most, hidden]` at an offset of the session's memory."""
        hidden = self.session.served.hidden
        most = min(self.session.area // (hidden * dtype.itemsize), self.session.served.limits.max_tokens_per_request)
        place = self.session.memory[offset : offset + most * hidden * dtype.itemsize]
        return place.view(dtype).view(most, hidden)

    def prepare(
        self, layer: int, dtype: torch.dtype, shared_experts: bool, version: int | None, timeout_us: int
    ) -> tuple[NativePrepared, Tensor, Tensor]:
        """The prepared call with its places. The first call of a kind prepares it for all layers."""
        kind = (dtype, shared_experts, version, timeout_us)
        found = self.prepared.get((layer, kind))
        if found is not None:
            return found
        served = self.session.served
        mine = next((moe for moe in served.moe_layers if moe.layer == layer), None)
        if mine is None:
            raise NotFoundError(
                f"layer {layer} has no MoE block in the service; client.model().moe_layers lists the layers with one", code="NOT_FOUND"
            )
        if mine.routes_by_token_id:
            raise UnsupportedError(f"layer {layer} routes by token id, which CUDA sessions do not; use a client with session=\"host\"")
        rows, output = self.place(self.rows_at, dtype), self.place(self.output_at, dtype)
        layers = [moe.layer for moe in served.moe_layers if not moe.routes_by_token_id]
        calls = self.session.native.prepare(
            [
                {
                    "layer": one,
                    "dtype": _DTYPES[dtype],
                    "max_rows": rows.shape[0],
                    "shared_experts": shared_experts,
                    "expected_weight_version": version,
                    "timeout_us": timeout_us,
                    "rows": self.rows_at,
                    "output": self.output_at,
                }
                for one in layers
            ]
        )
        for one, call in zip(layers, calls, strict=True):
            self.prepared[one, kind] = (call, rows, output)
        return self.prepared[layer, kind]

    def forward(self, rows: Tensor, out: Tensor, call: tuple[NativePrepared, Tensor, Tensor], capturing: bool) -> int:
        """Enqueues a call on the current stream and returns its number.

        The places belong to one call at a time, also if calls come from several streams. Within graphs, the program orders them.
        """
        prepared, place, output = call
        native, most = self.session.native, place.shape[0]
        not_a_number = self.session.not_a_number[rows.dtype]
        stream = torch.cuda.current_stream(rows.device)
        with self.lock:
            if not capturing and self.stream is not None and self.stream != stream:
                stream.wait_event(self.event)
            for start in range(0, rows.shape[0], most):
                piece = rows[start : start + most]
                count = piece.shape[0]
                place[:count].copy_(piece)
                native.enqueue(prepared, self.doorbell, count, stream.cuda_stream)
                self.calls += 1
                done = self.words == _DONE
                if done.shape[0] > 1:
                    done = done.all()
                torch.where(done, output[:count], not_a_number, out=out[start : start + count])
            if not capturing:
                self.event.record(stream)
                self.stream = stream
            return self.calls


class _Session:
    """A session in the memory of one GPU."""

    def __init__(self, address: str, device: torch.device, served: Model) -> None:
        self.device = device
        self.served = served
        wanted = min(_AREA_BYTES, served.limits.max_tokens_per_request * served.hidden * 4)
        self.area = -(-wanted // _ALIGN) * _ALIGN
        self.native = NativeCudaSession(address, device.index, 2 * _LANES * self.area, _LANES)
        with torch.cuda.device(device):
            self.memory = torch.from_dlpack(self.native.memory()).view(torch.uint8)
            self.not_a_number = {dtype: torch.full((), float("nan"), dtype=dtype, device=device) for dtype in _DTYPES}

    def synchronize(self) -> None:
        """Waits for the GPU and raises the exception of a call that failed."""
        torch.cuda.synchronize(self.device)
        self.native.check()


class CudaRoute:
    """The native half of `Client` with `session="cuda"`."""

    def __init__(self, address: str, retry: RetryPolicy | None) -> None:
        require_gpu()
        self.address = address
        self.retry = retry
        # Answers for the model; it opens no session.
        self._host = NativeClient([address], False, True, retry, None)
        self._lanes: dict[int, tuple[_Lane, ...]] = {}
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
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"rows have elements of {tensor.dtype}; expected bfloat16, float16 or float32")
        for name in _UNSUPPORTED:
            if options[name]:
                raise UnsupportedError(f'{name} is not supported with session="cuda"; use a client with session="host"')
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is {seconds}; expected a positive number of seconds, or None for no limit")
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
            with torch.cuda.device(tensor.device), torch.no_grad():
                timeout_us = 0 if seconds is None else max(int(seconds * 1e6), 1)
                shared = options["shared_experts"] == "include"
                call = lane.prepare(layer, tensor.dtype, shared, options["expected_weight_version"], timeout_us)
                number = lane.forward(tensor, out, call, capturing)
        except UnavailableError:
            self._forget(session)
            raise
        return CudaAnswer(out, lane, None if capturing else number)

    def _of(self, device: torch.device, capturing: bool) -> tuple[_Lane, ...]:
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
                    self._lanes[index] = tuple(_Lane(session, doorbell) for doorbell in range(_LANES))
            return self._lanes[index]

    def _open(self, device: torch.device, retry: bool) -> _Session:
        policy = self.retry if retry else None
        start, attempt = time.monotonic(), 1
        while True:
            try:
                return _Session(self.address, device, self._host.model(""))
            except (ConnectError, UnavailableError):
                pause = min(0.05 * 2 ** min(attempt - 1, 10), policy.max_pause) if policy else 0.0
                over = policy is None or attempt >= policy.max_attempts
                if over or (policy and time.monotonic() + pause - start > policy.max_elapsed):
                    raise
                time.sleep(pause)
                attempt += 1

    def _forget(self, session: _Session) -> None:
        """Lets the next call open another session, if this one has ended."""
        if not session.native.has_ended():
            return
        with self._lock:
            index = session.device.index
            if index in self._lanes and self._lanes[index][0].session is session:
                del self._lanes[index]
                self._ended.add(index)


def _tensor(rows: Any, what: str) -> Tensor:
    tensor = rows if isinstance(rows, Tensor) else torch.from_dlpack(rows) if hasattr(rows, "__dlpack__") else None
    if tensor is None or not tensor.is_cuda:
        found = type(rows).__name__ if tensor is None else f"a tensor on {tensor.device}"
        raise TypeError(
            f'{what} is {found}; with session="cuda" it must be on a GPU: pass {what}.cuda(), or use a client with session="host"'
        )
    return tensor.detach()


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
