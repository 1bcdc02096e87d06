"""Sessions whose memory lies on a GPU, and their calls as work of torch's streams."""

from __future__ import annotations

import itertools
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
from torch.utils.dlpack import from_dlpack  # type: ignore[import-not-found, unused-ignore]

from ._errors import NotFoundError
from ._native import NativeCudaSession, NativePrepared

if TYPE_CHECKING:
    from ._native import Model, Receipt

# Memory of a lane for rows, in bytes; as much again is for outputs. Calls with more rows are split.
_AREA_BYTES = 32 << 20
_ALIGN = 64
# One lane for calls, and one for those that graphs capture, because nothing orders replays of graphs and other calls.
LANES = 2
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Value of a completion word once the output is complete.
_DONE = 1


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
    _lane: Lane
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


class Kind(NamedTuple):
    """What calls have in common that are prepared together."""

    dtype: torch.dtype
    shared_experts: bool
    version: int | None
    timeout_us: int
    given_k: int
    return_routing: bool
    token_ids: bool


@dataclass(frozen=True)
class Prepared:
    """A prepared call with the places of what it reads and writes."""

    call: NativePrepared
    rows: Tensor
    output: Tensor
    ids: Tensor
    weights: Tensor
    token_ids: Tensor | None


@dataclass(frozen=True)
class Routing:
    """What a call carries besides rows."""

    ids: Tensor | None = None
    weights: Tensor | None = None
    token_ids: Tensor | None = None


class Lane:
    """A doorbell with its places in the session's memory. Its calls follow one another."""

    def __init__(self, session: CudaSession, doorbell: int) -> None:
        self.session = session
        self.doorbell = doorbell
        sizes = session.sizes
        places = itertools.accumulate(sizes.values(), initial=doorbell * sum(sizes.values()))
        self.places = dict(zip(sizes, places, strict=False))
        self.words = from_dlpack(session.native.words(doorbell))
        self.prepared: dict[tuple[int, Kind], Prepared] = {}
        self.lock = threading.Lock()
        self.event = torch.cuda.Event()  # type: ignore[no-untyped-call, unused-ignore]
        # The stream of the last call.
        self.stream: torch.cuda.Stream | None = None
        self.calls = 0

    def _place(self, name: str, dtype: torch.dtype, rows: int, columns: int) -> Tensor:
        """A place `[rows, columns]` of the session's memory."""
        start = self.places[name]
        return self.session.memory[start : start + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def prepare(self, layer: int, kind: Kind) -> Prepared:
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
                    "dtype": DTYPES[kind.dtype],
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
            self.prepared[moe.layer, kind] = Prepared(
                call,
                self._place("rows", kind.dtype, most, hidden),
                self._place("output", kind.dtype, most, hidden),
                self._place("ids", torch.int32, most, k),
                self._place("weights", torch.float32, most, k),
                self._place("token_ids", torch.int32, most, 1)[:, 0] if moe.routes_by_token_id else None,
            )
        return self.prepared[layer, kind]

    def forward(
        self, rows: Tensor, routing: Routing, out: Tensor, prepared: Prepared, return_routing: bool, ordered: bool
    ) -> CudaAnswer:
        """Enqueues a call on the current stream.

        The places belong to one call at a time. `ordered`: calls of several streams wait for each other. Within graphs, the program
        orders them.
        """
        native, most = self.session.native, prepared.rows.shape[0]
        not_a_number = self.session.not_a_number[rows.dtype]
        stream = torch.cuda.current_stream(rows.device)
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


class CudaSession:
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
        memory_bytes = LANES * sum(self.sizes.values())
        self.native = NativeCudaSession(address, device.index, memory_bytes, 2 * routing + token_ids, LANES)
        with torch.cuda.device(device):
            self.memory = from_dlpack(self.native.memory()).view(torch.uint8)
            self.not_a_number = {dtype: torch.full((), float("nan"), dtype=dtype, device=device) for dtype in DTYPES}

    def most(self, dtype: torch.dtype) -> int:
        """Largest number of rows of a call. Calls with more are split."""
        row_bytes: int = self.served.hidden * dtype.itemsize
        return min(self.sizes["rows"] // row_bytes, self.largest)

    def synchronize(self) -> None:
        """Waits for the GPU and raises the exception of a call that failed."""
        torch.cuda.synchronize(self.device)
        self.native.check()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
