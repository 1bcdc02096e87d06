"""The native half of the package. `expertd` re-exports the public classes; `Native…` are its own."""

from typing import Any, final


__version__: str

@final
class Array:
    """An array in host memory, row-major.

    It has the buffer protocol (except for bf16, which that protocol does not know) and DLPack, so
    `numpy.asarray(rows)`, `memoryview(rows)` and `torch.from_dlpack(rows)` share its memory. It may be written to.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Sizes of the dimensions: `[tokens, hidden]` for rows, `[tokens, k]` for ids and weights."""
    @property
    def dtype(self) -> str:
        """Element type: "bf16", "f16", "f32", "i32" or "u16"."""
    @property
    def nbytes(self) -> int:
        """Size of all elements, in bytes."""
    def view(self, dtype: str) -> Array:
        """The same memory as another type of 16 bits: "u16" for floats, "bf16" for "u16"."""
    def numpy(self) -> Any:
        """The same memory as a numpy array; bf16 needs ml_dtypes."""
    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any: ...
    def __dlpack__(
        self,
        *,
        stream: Any = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> Any: ...
    def __dlpack_device__(self) -> tuple[int, int]: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...
    def __len__(self) -> int: ...

@final
class StepTiming:
    """Phase timings of one step in nanoseconds; in each phase, those of the slowest rank."""

    @property
    def step(self) -> int: ...
    @property
    def tokens(self) -> int:
        """Number of tokens of the whole step, all requests together."""
    @property
    def copy_in_ns(self) -> int: ...
    @property
    def gate_ns(self) -> int: ...
    @property
    def prepare_ns(self) -> int: ...
    @property
    def dispatch_ns(self) -> int: ...
    @property
    def experts_ns(self) -> int: ...
    @property
    def combine_ns(self) -> int: ...
    @property
    def copy_out_ns(self) -> int: ...

@final
class Receipt:
    """The record of how an answer was computed."""

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of the steps that the request took part in; more than one if it was split.

        Through a session only the first and the last one.
        """
    @property
    def generation(self) -> int:
        """Generation of the EP group that computed the answer."""
    @property
    def weight_version(self) -> int:
        """Version of the weights that computed the answer; counts from 1 within one process of the service."""
    @property
    def weight_fingerprint(self) -> str:
        """Digest of the contents of the weights that computed the answer."""
    @property
    def tokens_per_rank(self) -> tuple[int, ...]:
        """Number of the request's tokens on each rank, summed over its steps."""
    @property
    def timings(self) -> tuple[StepTiming, ...]:
        """One entry per step; empty unless `return_timings` was set. Through a session one entry, the sum over the steps."""
    @property
    def topk_ids(self) -> Array | None:
        """`[tokens, k]` int32; None unless `return_routing` was set."""
    @property
    def topk_weights(self) -> Array | None:
        """`[tokens, k]` f32; None unless `return_routing` was set."""
    @property
    def queue_seconds(self) -> float:
        """Time from admission until the first step formed."""
    @property
    def step_seconds(self) -> float:
        """Time from the forming of the first step until the last row was back at the router rank."""

@final
class Answer:
    """The result of a call."""

    @property
    def rows(self) -> Array:
        """`[tokens, hidden]` in the dtype of the request's rows; the array that was passed as `out`, if there was one."""
    @property
    def receipt(self) -> Receipt: ...

@final
class ModelSummary:
    """A loaded model in a list."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str: ...
    @property
    def weight_version(self) -> int:
        """Number of the loaded weights; counts from 1 within one process of the service."""
    @property
    def weight_fingerprint(self) -> str:
        """Digest of the contents of the weights, the same for the same weights on every host."""

@final
class MoeLayer:
    """One decoder layer with an MoE block."""

    @property
    def layer(self) -> int: ...
    @property
    def num_experts(self) -> int: ...
    @property
    def top_k(self) -> int: ...
    @property
    def expert_width(self) -> int: ...
    @property
    def shared_width(self) -> int:
        """Width of the shared experts together; 0 if there are none."""
    @property
    def gate(self) -> str:
        """The gate in words."""
    @property
    def gate_json(self) -> str:
        """The gate as data."""
    @property
    def routes_by_token_id(self) -> bool:
        """Whether requests must carry `token_ids`."""
    @property
    def max_k(self) -> int:
        """Largest k of routing that callers send."""

@final
class Limits:
    """Limits of the service."""

    @property
    def max_tokens_per_request(self) -> int: ...
    @property
    def max_tokens_per_step(self) -> int: ...
    @property
    def max_tokens_per_rank(self) -> int: ...
    @property
    def max_message_bytes(self) -> int: ...
    @property
    def max_streams_per_connection(self) -> int: ...
    @property
    def max_connections(self) -> int: ...
    @property
    def max_bytes_in_flight(self) -> int: ...
    @property
    def max_requests_per_stream(self) -> int: ...

@final
class RankPlacement:
    """An expert rank and the experts that it owns."""

    @property
    def rank(self) -> int: ...
    @property
    def device(self) -> str: ...
    @property
    def experts(self) -> list[tuple[int, int, int]]:
        """`(layer, first, count)` for each MoE layer."""

@final
class Model:
    """Dimensions, layers, limits, placement and versions of a model."""

    @property
    def name(self) -> str: ...
    @property
    def family(self) -> str:
        """`model_type` of the checkpoint's config.json."""
    @property
    def weight_version(self) -> int:
        """Number of the loaded weights; counts from 1 within one process of the service."""
    @property
    def weight_fingerprint(self) -> str:
        """Digest of the contents of the weights, the same for the same weights on every host."""
    @property
    def generation(self) -> int: ...
    @property
    def hidden(self) -> int: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def moe_layers(self) -> tuple[MoeLayer, ...]: ...
    @property
    def dtypes(self) -> tuple[str, ...]:
        """Dtypes accepted for rows."""
    @property
    def weight_formats(self) -> tuple[str, ...]:
        """Storage formats of the expert weights, such as "bf16"."""
    @property
    def placement(self) -> tuple[RankPlacement, ...]: ...

@final
class Pending:
    """A call under way on a stream."""

    def result(self) -> Answer:
        """Waits for the answer and returns it, once. Raises the exception of a failed call."""
    def done(self) -> bool:
        """Whether `result` returns without waiting."""
    def cancel(self) -> None:
        """Stops waiting for the answer."""

@final
class NativeClient:
    def __init__(self, addresses: list[str], several: bool, session: str | None, retry: Any, credentials: Any) -> None: ...
    def pinned(self, fingerprint: str) -> NativeClient: ...
    def connect(self) -> None: ...
    async def connect_async(self) -> None: ...
    def forward(self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any], out: Any = None) -> Answer: ...
    async def forward_async(
        self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any], out: Any = None
    ) -> Answer: ...
    def model(self, name: str) -> Model: ...
    async def model_async(self, name: str) -> Model: ...
    def models(self) -> list[ModelSummary]: ...
    async def models_async(self) -> list[ModelSummary]: ...
    def stream(self, capacity: int) -> NativeStream: ...

@final
class NativePrepared:
    def call(
        self,
        stream: int,
        tokens: int,
        rows: int,
        output: int,
        routing: tuple[int, bool, int, int, bool] | None,
        token_ids: tuple[int, bool] | None,
        returned: tuple[int, int] | None,
        /,
    ) -> int: ...

@final
class NativeCudaSession:
    def __init__(
        self, address: str, device: int, area_bytes: int, routing_bytes: int, ends_process: bool, fingerprint: str | None
    ) -> None: ...
    def prepare(self, calls: list[dict[str, Any]]) -> list[NativePrepared]: ...
    def check(self) -> None: ...
    def verify(self) -> None: ...
    def check_ended(self) -> None: ...
    def is_kept(self) -> bool: ...
    def has_ended(self) -> bool: ...
    def last(self) -> tuple[int, Receipt | None]: ...

@final
class NativeStream:
    def submit(self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any]) -> Pending: ...
    async def forward_async(self, layer: int, rows: Any, seconds: float | None, options: dict[str, Any]) -> Answer: ...
    def close(self) -> None: ...
