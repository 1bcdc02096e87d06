"""Calls on CUDA tensors, through sessions whose memory lies on the tensors' GPU.

A call is work of torch's current stream: a copy into the session's memory, memory operations that start the call and wait for its end,
and a copy out of it. The host waits for none of them.
"""

from __future__ import annotations

import itertools
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
from torch.utils.dlpack import from_dlpack  # type: ignore[import-not-found, unused-ignore]

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
        topk_ids: `[tokens, k]` int32 on the GPU; None unless `return_routing` was set.
        topk_weights: `[tokens, k]` f32 on the GPU; None unless `return_routing` was set.
    """

    rows: Tensor
    topk_ids: Tensor | None
    topk_weights: Tensor | None
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


@dataclass(frozen=True)
class _Kind:
    """What calls have in common that are prepared together."""

    dtype: torch.dtype
    shared_experts: bool
    version: int | None
    timeout_us: int
    given_k: int
    return_routing: bool
    token_ids: bool


@dataclass(frozen=True)
class _Prepared:
    """A prepared call with the places of what it reads and writes."""

    call: NativePrepared
    rows: Tensor
    output: Tensor
    ids: Tensor
    weights: Tensor
    token_ids: Tensor | None


@dataclass(frozen=True)
class _Routing:
    """What a call carries besides rows."""

    ids: Tensor | None = None
    weights: Tensor | None = None
    token_ids: Tensor | None = None


class _Lane:
    """A doorbell with its places in the session's memory. Its calls follow one another."""

    def __init__(self, session: _Session, doorbell: int) -> None:
        self.session = session
        self.doorbell = doorbell
        sizes = session.sizes
        places = itertools.accumulate(sizes.values(), initial=doorbell * sum(sizes.values()))
        self.places = dict(zip(sizes, places, strict=False))
        self.words = from_dlpack(session.native.words(doorbell))
        self.prepared: dict[tuple[int, _Kind], _Prepared] = {}
        self.lock = threading.Lock()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        # The stream of the last call.
        self.stream: torch.cuda.Stream | None = None
        self.calls = 0

    def _place(self, name: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """A place `[rows, columns]` of the session's memory."""
        start = self.places[name]
        return self.session.memory[start : start + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def prepare(self, layer: int, kind: _Kind) -> _Prepared:
        """The prepared call of a layer. The first call of a kind prepares it for all layers that have it."""
        found = self.prepared.get((layer, kind))
        if found is not None:
            return found
        served = self.session.served
        if all(moe.layer != layer for moe in served.moe_layers):
            raise NotFoundError(
                f"layer {layer} has no MoE block in the service; client.model().moe_layers lists the layers with one",
                code="NOT_FOUND",
            )
        most = self.session.most(kind.dtype)
        layers = [
            moe
            for moe in served.moe_layers
            # What a layer does not allow, the service refuses with its own sentence.
            if moe.layer == layer or (kind.given_k <= moe.max_k and (kind.token_ids or not moe.routes_by_token_id))
        ]
        ks = [kind.given_k or (moe.top_k if kind.return_routing else 0) for moe in layers]
        calls = self.session.native.prepare(
            [
                {
                    "layer": moe.layer,
                    "dtype": _DTYPES[kind.dtype],
                    "max_rows": most,
                    "shared_experts": kind.shared_experts,
                    "expected_weight_version": kind.version,
                    "timeout_us": kind.timeout_us,
                    "k": k,
                    "given_routing": kind.given_k > 0,
                    "return_routing": kind.return_routing,
                    "token_ids": kind.token_ids and moe.routes_by_token_id,
                    "places": self.places,
                }
                for moe, k in zip(layers, ks, strict=True)
            ]
        )
        hidden = served.hidden
        for moe, k, call in zip(layers, ks, calls, strict=True):
            self.prepared[moe.layer, kind] = _Prepared(
                call,
                self._place("rows", kind.dtype, most, hidden),
                self._place("output", kind.dtype, most, hidden),
                self._place("ids", torch.int32, most, k),
                self._place("weights", torch.float32, most, k),
                self._place("token_ids", torch.int32, most, 1)[:, 0] if moe.routes_by_token_id else None,
            )
        return self.prepared[layer, kind]

    def forward(self, rows: Tensor, routing: _Routing, out: Tensor, prepared: _Prepared, return_routing: bool) -> CudaAnswer:
        """Enqueues a call on the current stream.

        The places belong to one call at a time, also if calls come from several streams. Within graphs, the program orders them.
        """
        native, most = self.session.native, prepared.rows.shape[0]
        not_a_number = self.session.not_a_number[rows.dtype]
        stream = torch.cuda.current_stream(rows.device)
        ordered = not torch.cuda.is_current_stream_capturing()
        returned = []
        with self.lock:
            if ordered and self.stream is not None and self.stream != stream:
                stream.wait_event(self.event)
            for start in range(0, rows.shape[0], most):
                piece = slice(start, min(start + most, rows.shape[0]))
                count = piece.stop - start
                prepared.rows[:count].copy_(rows[piece])
                if routing.ids is not None and routing.weights is not None:
                    prepared.ids[:count].copy_(routing.ids[piece])
                    prepared.weights[:count].copy_(routing.weights[piece])
                if routing.token_ids is not None and prepared.token_ids is not None:
                    prepared.token_ids[:count].copy_(routing.token_ids[piece])
                native.enqueue(prepared.call, self.doorbell, count, stream.cuda_stream)
                self.calls += 1
                done = self.words == _DONE
                if done.shape[0] > 1:
                    done = done.all()
                torch.where(done, prepared.output[:count], not_a_number, out=out[piece])
                if return_routing:
                    returned.append((prepared.ids[:count].clone(), prepared.weights[:count].clone()))
            if ordered:
                self.event.record(stream)
                self.stream = stream
            number = self.calls if ordered else None
        ids, weights = (torch.cat(parts) for parts in zip(*returned, strict=True)) if returned else (None, None)
        return CudaAnswer(out, ids, weights, self, number)


class _Session:
    """A session in the memory of one GPU."""

    def __init__(self, address: str, device: torch.device, served: Model) -> None:
        self.device = device
        self.served = served
        limit, k = served.limits.max_tokens_per_request, max(moe.max_k for moe in served.moe_layers)
        area = _aligned(min(_AREA_BYTES, limit * served.hidden * 4))
        # Rows of two bytes are the most.
        self.largest = min(area // (served.hidden * 2), limit)
        routing, token_ids = _aligned(self.largest * k * 4), _aligned(self.largest * 4)
        # Sizes of a lane's places, in bytes.
        self.sizes = {"rows": area, "output": area, "ids": routing, "weights": routing, "token_ids": token_ids}
        memory_bytes = _LANES * sum(self.sizes.values())
        self.native = NativeCudaSession(address, device.index, memory_bytes, 2 * routing + token_ids, _LANES)
        with torch.cuda.device(device):
            self.memory = from_dlpack(self.native.memory()).view(torch.uint8)
            self.not_a_number = {dtype: torch.full((), float("nan"), dtype=dtype, device=device) for dtype in _DTYPES}

    def most(self, dtype: torch.dtype) -> int:
        """Largest number of rows of a call. Calls with more are split."""
        return min(self.sizes["rows"] // (self.served.hidden * dtype.itemsize), self.largest)

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
        if options["dtype"] not in (None, _DTYPES[tensor.dtype]):
            raise TypeError(f"rows have elements of {tensor.dtype}, and dtype says {options['dtype']!r}; leave dtype out")
        routing = _routing(options, tensor)
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
                kind = _Kind(
                    dtype=tensor.dtype,
                    shared_experts=options["shared_experts"] == "include",
                    version=options["expected_weight_version"],
                    timeout_us=0 if seconds is None else max(int(seconds * 1e6), 1),
                    given_k=0 if routing.ids is None else routing.ids.shape[1],
                    return_routing=options["return_routing"],
                    token_ids=routing.token_ids is not None,
                )
                prepared = lane.prepare(layer, kind)
                return lane.forward(tensor, routing, out, prepared, kind.return_routing)
        except UnavailableError:
            self._forget(session)
            raise

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
    tensor = rows if isinstance(rows, Tensor) else from_dlpack(rows) if hasattr(rows, "__dlpack__") else None
    if tensor is None or not tensor.is_cuda:
        found = type(rows).__name__ if tensor is None else f"a tensor on {tensor.device}"
        raise TypeError(
            f'{what} is {found}; with session="cuda" it must be on a GPU: pass {what}.cuda(), or use a client with session="host"'
        )
    return tensor.detach()


def _routing(options: dict[str, Any], rows: Tensor) -> _Routing:
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
    return _Routing(ids, weights, token_ids)


def _integers(array: Any, what: str) -> Tensor:
    """int32 or int64. Numbers beyond int32 become others that no expert has."""
    tensor = _tensor(array, what)
    if tensor.dtype == torch.int64:
        return tensor.clamp(-(2**31), 2**31 - 1)
    if tensor.dtype != torch.int32:
        raise TypeError(f"{what} has elements of {tensor.dtype}; expected int32 or int64")
    return tensor


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN


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
