"""Names of types for annotations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol, TypeAlias, TypedDict


class SupportsDLPack(Protocol):
    """An array with the DLPack protocol, such as a torch tensor."""

    def __dlpack__(self) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


# Before Python 3.12 there is no type for objects with the buffer protocol.
Rows: TypeAlias = SupportsDLPack | Any
Address: TypeAlias = str | Sequence[str]
Session: TypeAlias = Literal["host", "cuda", "network"]
GraphFailure: TypeAlias = Literal["abort", "raise"]
DType: TypeAlias = Literal["bf16", "f16", "f32"]
SharedExperts: TypeAlias = Literal["include", "exclude"]


class ForwardOptions(TypedDict, total=False):
    """Optional arguments of `forward` and `submit`; `Client.forward` describes them."""

    model: str
    dtype: DType | None
    topk_ids: Rows | None
    topk_weights: Rows | None
    token_ids: Rows | None
    shared_experts: SharedExperts
    expected_weight_version: int | None
    return_routing: bool
    return_timings: bool
