"""A service behind the modules of a model in torch, and the operator that calls it where torch has to see the call."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from ._client import Client, Credentials, RetryPolicy
from ._content import check_weights
from ._errors import UnsupportedError, WeightVersionError

if TYPE_CHECKING:
    from ._native import Model, MoeLayer
    from ._types import Address, GraphFailure, Session, SharedExperts

# A rank that died is replaced within seconds; reading a large checkpoint again takes minutes.
_RETRY = RetryPolicy(max_attempts=1_000, max_pause=2.0, max_elapsed=600.0)
_numbers = itertools.count(1)
_remotes: weakref.WeakValueDictionary[int, Remote] = weakref.WeakValueDictionary()


# What a caller of a model can do whose service has moved to other weights.
_WAY_OUT = (
    "The model was loaded with the expected ones, and attention of one checkpoint with experts of another is neither. Serve those weights "
    "again (expertd reload), load the model again, or let it follow reloads: remote_experts(…, follow_weights=True), or "
    "EXPERTD_FOLLOW_WEIGHTS=1 for vLLM and SGLang"
)

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")


def _with_way_out(method: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """`method`, whose WeightVersionError also says what the caller can do."""

    @functools.wraps(method)
    def explained(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> _Result:
        try:
            return method(*args, **kwargs)
        except WeightVersionError as error:
            raise WeightVersionError(f"{error}. {_WAY_OUT}", code=error.code, reason=error.reason) from error

    return explained


class Remote:
    """A connection that the modules of a model, and copies of the model, share.

    Unless `follows` is true, the experts are those of the weights that the service had when the model was loaded, also in copies that are
    unpickled later (`weights` is their fingerprint). Once the service has others, calls raise WeightVersionError.
    """

    def __init__(
        self,
        address: Address,
        credentials: Credentials | None = None,
        session: Session | None = None,
        on_graph_failure: GraphFailure = "abort",
        follows: bool = False,
        weights: str | None = None,
    ) -> None:
        self.address = address
        self.credentials = credentials
        self.session = session
        self.on_graph_failure = on_graph_failure
        self.client = Client(
            address, session=session, retry=_RETRY, credentials=credentials, on_graph_failure=on_graph_failure
        )
        # With session="cuda": the client of rows in host memory.
        self._host: Client | None = None
        self.model: Model = self.client.model()
        self.follows = follows
        self.weights = None if follows else weights or self.model.weight_fingerprint
        if self.weights is not None:
            _with_way_out(check_weights)(self.weights, self.model)
            self.client._native = self.client._native.pinned(self.weights)
        self._layers = {layer.layer: layer for layer in self.model.moe_layers}
        self._most: int = self.model.limits.max_tokens_per_request
        self.number = next(_numbers)
        _remotes[self.number] = self

    def layer(self, number: int) -> MoeLayer:
        """The service's description of one layer."""
        return self._layers[number]

    def __deepcopy__(self, memo: dict[int, Any]) -> Remote:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return (Remote, (self.address, self.credentials, self.session, self.on_graph_failure, self.follows, self.weights))

    @_with_way_out
    def verify(self) -> None:
        """With `session="cuda"`: raises the exception of a call that failed, in every thread and each time. Waits for nothing."""
        if self.session == "cuda":
            self.client._native.verify()

    @_with_way_out
    def synchronize(self) -> None:
        """With `session="cuda"`: waits for the GPU's work and raises the exception of a call that failed."""
        self.client.synchronize()

    def end_with_session(self) -> None:
        """With `session="cuda"`: once a session has ended whose calls graphs captured, calls fail instead of opening another one."""
        self.client._native.reopens = False

    @_with_way_out
    def forward(
        self,
        layer: int,
        rows: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        token_ids: Tensor | None,
        shared_experts: bool,
    ) -> Tensor:
        """Sends rows `[..., hidden]` in pieces that the service accepts. The result is on the device of `rows`."""
        if rows.numel() == 0:
            return torch.empty_like(rows)
        client = self.client
        if self.session == "cuda":
            if rows.is_cuda:
                return client._native.enqueue(layer, rows, topk_ids, topk_weights, token_ids, shared_experts)
            # Layers that a device map left on the CPU.
            if self._host is None:
                self._host = Client(self.address, session="host", retry=_RETRY, expected_weight_fingerprint=self.weights)
            client = self._host
        here = rows.detach().reshape(-1, rows.shape[-1]).cpu().contiguous()
        ids, weights, tids = (None if t is None else t.detach().cpu().contiguous() for t in (topk_ids, topk_weights, token_ids))
        # The service refuses weights that are not finite. Rows that are not finite have such weights, for example padding that
        # attention masks entirely. The output of these rows is NaN.
        spoiled = None
        if weights is not None and not bool(torch.isfinite(weights).all()):
            spoiled = ~torch.isfinite(weights).all(dim=-1)
            weights = torch.where(spoiled[:, None], torch.zeros_like(weights), weights)
        shared: SharedExperts = "include" if shared_experts else "exclude"
        parts = []
        for start in range(0, here.shape[0], self._most):
            piece = slice(start, start + self._most)
            answer = client.forward(
                layer,
                here[piece],
                topk_ids=None if ids is None else ids[piece],
                topk_weights=None if weights is None else weights[piece],
                token_ids=None if tids is None else tids[piece],
                shared_experts=shared,
            )
            parts.append(torch.from_dlpack(answer.rows))
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
        if spoiled is not None:
            out[spoiled] = float("nan")
        return out.view(rows.shape).to(rows.device)

    def routed(
        self,
        layer: int,
        rows: Tensor,
        topk_ids: Tensor | None,
        topk_weights: Tensor | None,
        shared_experts: bool = False,
    ) -> Tensor:
        """The experts of one layer of an engine. The engine has chosen and weighed the routed ones, with ids of −1 for no expert, or leaves
        that to the service's gate (None)."""
        # The service requires token ids for layers that route by token id, but does not use them when the request has routing.
        by_token_id = topk_ids is not None and self.layer(layer).routes_by_token_id
        token_ids = torch.zeros(rows.shape[0], dtype=torch.int32, device=rows.device) if by_token_id else None
        return self.forward(layer, rows, topk_ids, topk_weights, token_ids, shared_experts)

    def call(
        self,
        layer: int,
        rows: Tensor,
        topk_ids: Tensor | None = None,
        topk_weights: Tensor | None = None,
        token_ids: Tensor | None = None,
        shared_experts: bool = False,
    ) -> Tensor:
        """As `forward`, through the operator `expertd::moe` where torch has to see the call."""
        if _is_watched(rows, topk_weights):
            return moe(rows, topk_ids, topk_weights, token_ids, self.number, layer, shared_experts)
        return self.forward(layer, rows, topk_ids, topk_weights, token_ids, shared_experts)


def _is_watched(rows: Tensor, topk_weights: Tensor | None) -> bool:
    """Whether torch compiles, traces, differentiates or intercepts what happens to these tensors.

    Otherwise a call need not be an operator, whose way through torch's dispatcher and Python takes longer than the call itself.
    """
    if torch.compiler.is_compiling() or type(rows) is not Tensor or rows.is_meta:
        return True
    if torch.is_grad_enabled() and (rows.requires_grad or (topk_weights is not None and topk_weights.requires_grad)):
        return True
    return torch._C._len_torch_dispatch_stack() > 0 or torch._C._get_tracing_state() is not None


@torch.library.custom_op("expertd::moe", mutates_args=())
def moe(
    rows: Tensor,
    topk_ids: Tensor | None,
    topk_weights: Tensor | None,
    token_ids: Tensor | None,
    remote: int,
    layer: int,
    shared_experts: bool,
) -> Tensor:
    """Computes one layer's MoE block, or only its routed experts, at the service with this number."""
    return _remotes[remote].forward(layer, rows, topk_ids, topk_weights, token_ids, shared_experts)


@moe.register_fake
def _(rows: Tensor, *_others: Any) -> Tensor:
    return torch.empty_like(rows, memory_format=torch.contiguous_format)


def _refuse_gradients(context: Any, gradient: Tensor) -> None:
    raise UnsupportedError(
        "remote experts compute no gradients; load the model outside of remote_experts to train it, and run it under "
        "torch.no_grad() otherwise"
    )


moe.register_autograd(_refuse_gradients)
