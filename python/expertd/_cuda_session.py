"""Sessions whose memory lies on a GPU, and their calls as work of torch's streams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]

from ._errors import NotFoundError
from ._native import NativeCudaSession, NativePrepared

if TYPE_CHECKING:
    from ._native import Model, Receipt

# Memory for the rows of a call, in bytes; as much again is for outputs. Calls with more rows are split.
_AREA_BYTES = 32 << 20
# Largest number of rows of a call, which has 16 bits in a doorbell.
_MAX_ROWS = 0xFFFF
_ALIGN = 64
_YEAR = 365 * 24 * 3600
INTEGERS = (torch.int32, torch.int64)
DTYPES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
# Element types of weights, as the native half numbers them.
_WEIGHTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}


def _stream_of(device: int) -> int:
    handle: int = torch.cuda.current_stream(device).cuda_stream
    return handle


# The handle of a GPU's current stream, without a Python object around it where torch can do that.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", _stream_of)


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
    _session: CudaSession
    _number: int

    @property
    def receipt(self) -> Receipt | None:
        """Waits for the GPU and returns the record of the call; of its last part if it was split. None if the same client made another
        call meanwhile, or a graph captured the call.

        Raises the exception of a call that failed.
        """
        self._session.synchronize()
        ended, receipt = self._session.native.last()
        return receipt if ended == self._number else None


class Kind(NamedTuple):
    """What calls have in common that are prepared together."""

    dtype: torch.dtype
    shared_experts: bool
    version: int | None = None
    # From `rounded_timeout`; 0 for none.
    timeout_us: int = 0
    given_k: int = 0
    return_routing: bool = False
    token_ids: bool = False


class Prepared(NamedTuple):
    """A prepared call of one layer."""

    session: CudaSession
    call: NativePrepared
    device: int
    # Experts per token of given or returned routing.
    k: int
    by_token_id: bool

    def enqueue(
        self,
        rows: Tensor,
        out: Tensor,
        tokens: int,
        ids: Tensor | None = None,
        weights: Tensor | None = None,
        token_ids: Tensor | None = None,
        masks: bool = False,
        returned: tuple[Tensor, Tensor] | None = None,
    ) -> int:
        """Enqueues the call on the current stream and returns its number, 0 in a graph. All tensors are row-major and on the session's GPU.

        Arguments:
            ids: `[tokens, k]` int32 or int64, if the call was prepared with given routing; `weights` belong to it.
            token_ids: `[tokens]` int32 or int64, if the call was prepared with them.
            masks: a row with a weight that is not finite gets NaN; otherwise the service refuses the call.
            returned: `[tokens, k]` int32 and f32, which receive the routing.
        """
        routing = None
        if ids is not None and weights is not None:
            routing = (ids.data_ptr(), ids.dtype is torch.int64, weights.data_ptr(), _WEIGHTS[weights.dtype], masks)
        return self.call.call(
            current_stream(self.device),
            tokens,
            rows.data_ptr(),
            out.data_ptr(),
            routing,
            None if token_ids is None else (token_ids.data_ptr(), token_ids.dtype is torch.int64),
            None if returned is None else (returned[0].data_ptr(), returned[1].data_ptr()),
        )


def rounded_timeout(seconds: float) -> int:
    """A timeout in microseconds, at most a quarter longer than asked for and a year: a number whose binary digits after the third are zero.

    Each timeout is prepared on its own, and a session has room for 65536 prepared calls.
    """
    exact = max(int(min(seconds, _YEAR) * 1e6), 1)
    shift = max(exact.bit_length() - 3, 0)
    return -(-exact >> shift) << shift


def as_weights(weights: Tensor) -> Tensor:
    """Weights in a type that the kernels of a session read, row-major."""
    return (weights if weights.dtype in _WEIGHTS else weights.float()).contiguous()


class CudaSession:
    """A session in the memory of one GPU."""

    def __init__(self, address: str, device: int, served: Model, ends_process: bool = True, weights: str | None = None) -> None:
        self.device = device
        self.served = served
        self._prepared: dict[tuple[int, Kind], Prepared] = {}
        limit, k = served.limits.max_tokens_per_request, max(moe.max_k for moe in served.moe_layers)
        self._area_bytes = _aligned(min(_AREA_BYTES, limit * served.hidden * 4))
        # The area holds the most rows if elements have two bytes.
        self._largest = min(self._area_bytes // (served.hidden * 2), limit, _MAX_ROWS)
        routing_bytes = 2 * _aligned(self._largest * k * 4) + _aligned(self._largest * 4)
        self.native = NativeCudaSession(address, device, self._area_bytes, routing_bytes, ends_process, weights)

    def prepare(self, layer: int, kind: Kind) -> Prepared:
        """The prepared call of a layer. The first call of a kind without a timeout prepares it for all layers that have it."""
        found = self._prepared.get((layer, kind))
        if found is not None:
            return found
        if all(moe.layer != layer for moe in self.served.moe_layers):
            raise NotFoundError(
                f"layer {layer} has no MoE block in the service; client.model().moe_layers lists the layers with one",
                code="NOT_FOUND",
            )
        # Calls with more rows are split.
        most = min(self._area_bytes // (self.served.hidden * kind.dtype.itemsize), self._largest)
        layers = [
            moe
            for moe in self.served.moe_layers
            # The service refuses what a layer does not allow, with its own message.
            if moe.layer == layer
            or (kind.timeout_us == 0 and kind.given_k <= moe.max_k and (kind.token_ids or not moe.routes_by_token_id))
        ]
        ks = [kind.given_k or (moe.top_k if kind.return_routing else 0) for moe in layers]
        calls = self.native.prepare(
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
                }
                for moe, k in zip(layers, ks, strict=True)
            ]
        )
        for moe, k, call in zip(layers, ks, calls, strict=True):
            self._prepared[moe.layer, kind] = Prepared(self, call, self.device, k, moe.routes_by_token_id)
        return self._prepared[layer, kind]

    def synchronize(self) -> None:
        """Waits for the GPU and raises the exception of a call that failed."""
        torch.cuda.synchronize(self.device)
        self.native.check()


def _aligned(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
