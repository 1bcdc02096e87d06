"""The native half of `Client` with `session="cuda"`: calls on CUDA tensors.

A call is work of torch's current stream: a kernel that copies into the session's memory, memory operations that start the call and wait for
its end, and a kernel that copies out of it. The host waits for none of them.
"""

from __future__ import annotations

import logging
import math
import os
import pathlib
import threading
import time
from typing import TYPE_CHECKING, Any

import torch  # type: ignore[import-not-found, unused-ignore]
from torch import Tensor  # type: ignore[import-not-found, unused-ignore]
from torch.utils.dlpack import from_dlpack  # type: ignore[import-not-found, unused-ignore]

from ._content import check_weights
from ._cuda_session import DTYPES, INTEGERS, CudaAnswer, CudaSession, Kind, Prepared, as_weights, rounded_timeout
from ._errors import ConnectError, NotFoundError, UnavailableError, UnsupportedError
from ._native import NativeClient

if TYPE_CHECKING:
    from ._client import RetryPolicy
    from ._native import Model, ModelSummary, NativeStream
    from ._types import GraphFailure

_logger = logging.getLogger(__name__)


def require_gpu() -> None:
    """Raises UnsupportedError if torch sees no GPU in this process."""
    if not torch.cuda.is_available():
        raise UnsupportedError(
            'session="cuda": torch sees no GPU in this process (torch.cuda.is_available() is False); pass session="host" to a '
            "service on this host, or leave session out"
        )


class CudaRoute:
    """The native half of `Client` with `session="cuda"`."""

    def __init__(self, address: str, retry: RetryPolicy | None, on_graph_failure: GraphFailure = "abort") -> None:
        require_gpu()
        self.address = address
        self.retry = retry
        self.on_graph_failure = on_graph_failure
        # Fingerprint of the weights that must compute the calls; None follows reloads of the service.
        self.weights: str | None = None
        # Answers for the model; it opens no session.
        self._host = NativeClient([address], False, "host", retry, None)
        self._sessions: dict[int, CudaSession] = {}
        # Sessions that have ended and were replaced, and whose calls are in graphs.
        self._replaced: list[CudaSession] = []
        # Calls that `enqueue` prepared, by layer, dtype, GPU, shared experts, experts per token and token ids.
        self._prepared: dict[tuple[int, torch.dtype, int, bool, int, bool], Prepared] = {}
        self._ended: set[int] = set()
        self._lock = threading.Lock()
        # False for engines: their graphs belong to the session that ended, so that another one would only delay their end.
        self.reopens = True

    def pinned(self, fingerprint: str) -> CudaRoute:
        """Makes calls fail unless the weights with this fingerprint compute them; called before the first call."""
        self.weights = fingerprint
        return self

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
        for device in {session.device for session in (*self._sessions.values(), *self._replaced)}:
            torch.cuda.synchronize(device)
        self.check()

    def check(self) -> None:
        """Raises the exception of a call that failed, if it was not raised before. Waits for nothing."""
        for session in list(self._sessions.values()):
            session.native.check()
        for session in list(self._replaced):
            session.native.check_ended()

    def verify(self) -> None:
        """Raises the exception of a call that failed, in every thread and each time. For engines, which end with the first failure."""
        for session in (*list(self._sessions.values()), *self._replaced):
            session.native.verify()

    def forward(self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any], out: Any = None) -> CudaAnswer:
        tensor = _tensor(rows, "rows")
        if tensor.dim() != 2:
            raise ValueError(f"rows has shape {list(tensor.shape)}; expected [tokens, hidden]")
        if tensor.dtype not in DTYPES:
            raise TypeError(f"rows have elements of {tensor.dtype}; expected bfloat16, float16 or float32")
        if options["dtype"] not in (None, DTYPES[tensor.dtype]):
            raise TypeError(f"rows have elements of {tensor.dtype}, and dtype says {options['dtype']!r}; leave dtype out")
        ids, weights, token_ids = _routing(options, tensor)
        if seconds is not None and not seconds > 0:
            raise ValueError(f"timeout is {seconds}; expected a positive number of seconds, or None for no limit")
        tokens = tensor.shape[0]
        out = torch.empty_like(tensor, memory_format=torch.contiguous_format) if out is None else _checked_output(out, tensor)
        session = self._session(tensor.get_device(), seconds)
        served = session.served
        if options["model"] not in ("", served.name):
            raise NotFoundError(f"the service has no model {options['model']!r}; it serves {served.name!r}", code="NOT_FOUND")
        if tensor.shape[1] != served.hidden:
            raise ValueError(f"rows have {tensor.shape[1]} elements each; the model's hidden size is {served.hidden}")
        if tokens == 0:
            raise ValueError("rows has no rows; a session's call needs at least one")
        kind = Kind(
            dtype=tensor.dtype,
            shared_experts=options["shared_experts"] == "include",
            version=options["expected_weight_version"],
            timeout_us=0 if seconds is None else rounded_timeout(seconds),
            given_k=0 if ids is None else ids.shape[1],
            return_routing=options["return_routing"],
            token_ids=token_ids is not None,
        )
        try:
            prepared = session.prepare(layer, kind)
            returned = None
            if kind.return_routing:
                shape = (tokens, prepared.k)
                new_ids = torch.empty(shape, dtype=torch.int32, device=tensor.device)
                returned = new_ids, torch.empty(shape, dtype=torch.float32, device=tensor.device)
            if not prepared.by_token_id:
                token_ids = None
            number = prepared.enqueue(tensor.contiguous(), out, tokens, ids, weights, token_ids, returned=returned)
        except UnavailableError:
            self._forget(session)
            raise
        topk_ids, topk_weights = returned or (None, None)
        return CudaAnswer(out, topk_ids, topk_weights, session, number)

    def enqueue(
        self, layer: int, rows: Tensor, ids: Tensor | None, weights: Tensor | None, token_ids: Tensor | None, shared_experts: bool
    ) -> Tensor:
        """A call for the module of a model: as `forward`, with `rows` of shape `[..., hidden]` and everything else flat.

        Eager models spend most of a decode step in Python, so that this does as little as it can. Rows with weights that are not finite
        become NaN.
        """
        device, hidden = rows.get_device(), rows.shape[-1]
        tokens = rows.numel() // hidden
        key = (layer, rows.dtype, device, shared_experts, 0 if ids is None else ids.shape[1], token_ids is not None)
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepare(key)
        if hidden != prepared.session.served.hidden:
            raise ValueError(f"rows have {hidden} elements each; the model's hidden size is {prepared.session.served.hidden}")
        if not rows.is_contiguous():
            rows = rows.contiguous()
        if ids is not None and weights is not None:
            if ids.shape != weights.shape or ids.shape[0] != tokens or ids.get_device() != device or weights.get_device() != device:
                raise ValueError(
                    f"ids are {list(ids.shape)} on {ids.device} and weights {list(weights.shape)} on {weights.device}; expected "
                    f"[{tokens}, k] on {rows.device} of both"
                )
            if ids.dtype not in INTEGERS:
                raise TypeError(f"ids have elements of {ids.dtype}; expected int32 or int64")
            if not ids.is_contiguous():
                ids = ids.contiguous()
            if weights.dtype is not torch.float32 or not weights.is_contiguous():
                weights = as_weights(weights)
        if token_ids is not None:
            if token_ids.dtype not in INTEGERS or token_ids.numel() != tokens:
                raise ValueError(
                    f"token ids are {token_ids.dtype} {list(token_ids.shape)}; expected int32 or int64, one for each of {tokens} rows"
                )
            token_ids = token_ids.to(rows.device).contiguous()
        out = torch.empty_like(rows)
        try:
            prepared.enqueue(rows, out, tokens, ids, weights, token_ids, masks=True)
        except UnavailableError:
            self._forget(prepared.session)
            raise
        return out

    def _prepare(self, key: tuple[int, torch.dtype, int, bool, int, bool]) -> Prepared:
        layer, dtype, device, shared_experts, k, has_token_ids = key
        if dtype not in DTYPES:
            raise TypeError(f"rows have elements of {dtype}; expected bfloat16, float16 or float32")
        session = self._session(device)
        kind = Kind(dtype, shared_experts, given_k=k, token_ids=has_token_ids)
        try:
            prepared = session.prepare(layer, kind)
        except UnavailableError:
            self._forget(session)
            raise
        with self._lock:
            if self._sessions.get(device) is session:
                self._prepared[key] = prepared
        return prepared

    def _session(self, device: int, seconds: float | None = None) -> CudaSession:
        """The session on a GPU; opens one if there is none, or the last one has ended. No attempt to open it starts after `seconds`."""
        found = self._sessions.get(device)
        if found is not None:
            return found
        if not self.reopens:
            self.verify()
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedError(
                "a CUDA graph cannot capture the opening of a session; make one call of this client before the capture begins"
            )
        with self._lock:
            if device not in self._sessions:
                self._sessions[device] = self._open(device, device in self._ended, seconds)
            return self._sessions[device]

    def _open(self, device: int, retry: bool, seconds: float | None) -> CudaSession:
        policy = self.retry if retry else None
        limit = math.inf if seconds is None else seconds
        start, attempt = time.monotonic(), 1
        while True:
            try:
                model = self._host.model("")
                check_weights(self.weights, model)
                session = CudaSession(self.address, device, model, self.on_graph_failure == "abort", self.weights)
                warn_of_sharing(len(model.placement), torch.cuda.device_count())
                return session
            except (ConnectError, UnavailableError):
                pause = min(0.05 * 2 ** min(attempt - 1, 10), policy.max_pause) if policy else 0.0
                over = policy is None or attempt >= policy.max_attempts
                if over or (policy and time.monotonic() + pause - start > min(policy.max_elapsed, limit)):
                    raise
                time.sleep(pause)
                attempt += 1

    def _forget(self, session: CudaSession) -> None:
        """Lets the next call open another session, if this one has ended."""
        if not session.native.has_ended():
            return
        with self._lock:
            if self._sessions.get(session.device) is session:
                # First, so that a check in another thread misses nothing.
                if session.native.is_kept():
                    self._replaced.append(session)
                del self._sessions[session.device]
                self._ended.add(session.device)
            self._prepared = {key: known for key, known in self._prepared.items() if known.session is not session}


def warn_of_sharing(ranks: int, gpus: int) -> None:
    """Warns if the service probably has a rank on each GPU that this process sees, and they do not share them through MPS."""
    folder = os.environ.get("CUDA_MPS_PIPE_DIRECTORY") or "/tmp/nvidia-mps"
    if ranks >= gpus and not (pathlib.Path(folder) / "control").exists():
        _logger.warning(
            "there is no MPS daemon in %s. If this process and the service's ranks use the same GPU, it changes between them, and a decode "
            "step takes 1.5 to 3 times as long: run nvidia-cuda-mps-control -d before both",
            folder,
        )


def _tensor(rows: Any, what: str) -> Tensor:
    tensor = rows if isinstance(rows, Tensor) else from_dlpack(rows) if hasattr(rows, "__dlpack__") else None
    if tensor is None or not tensor.is_cuda:
        found = type(rows).__name__ if tensor is None else f"a tensor on {tensor.device}"
        raise TypeError(
            f'{what} is {found}; with session="cuda" it must be on a GPU: pass {what}.cuda(), or use a client with session="host"'
        )
    return tensor.detach()


def _routing(options: dict[str, Any], rows: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Ids, weights and token ids of a call, row-major on the GPU of its rows."""
    ids, weights, token_ids = (options[name] for name in ("topk_ids", "topk_weights", "token_ids"))
    if (ids is None) != (weights is None):
        raise ValueError("topk_ids and topk_weights belong together: pass both, or neither to let the service run the gate")
    tokens = rows.shape[0]
    if ids is not None:
        ids, weights = _integers(ids, "topk_ids", rows), _beside(_tensor(weights, "topk_weights"), "topk_weights", rows)
        if ids.dim() != 2 or ids.shape != weights.shape or ids.shape[0] != tokens or ids.shape[1] == 0:
            raise ValueError(
                f"topk_ids has shape {list(ids.shape)} and topk_weights {list(weights.shape)}; expected [{tokens}, k] of both"
            )
        if not weights.is_floating_point():
            raise TypeError(f"topk_weights has elements of {weights.dtype}; expected floats")
        weights = as_weights(weights)
    if token_ids is not None:
        token_ids = _integers(token_ids, "token_ids", rows)
        if token_ids.shape != (tokens,):
            raise ValueError(f"token_ids has shape {list(token_ids.shape)}; expected [{tokens}]")
    return ids, weights, token_ids


def _integers(array: Any, what: str, rows: Tensor) -> Tensor:
    tensor = _beside(_tensor(array, what), what, rows)
    if tensor.dtype not in INTEGERS:
        raise TypeError(f"{what} has elements of {tensor.dtype}; expected int32 or int64")
    return tensor.contiguous()


def _beside(tensor: Tensor, what: str, rows: Tensor) -> Tensor:
    if tensor.device != rows.device:
        raise ValueError(f"{what} is on {tensor.device} and rows on {rows.device}; expected one GPU: pass {what}.to(rows.device)")
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
