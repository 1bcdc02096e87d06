"""The blocking client."""

from __future__ import annotations

import os
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from ._errors import UnsupportedError
from ._native import NativeClient, NativeStream, Pending

if TYPE_CHECKING:
    from ._cuda import CudaRoute
    from ._cuda_session import CudaAnswer
    from ._native import Answer, Model, ModelSummary
    from ._types import Address, DType, ForwardOptions, GraphFailure, Rows, Session, SharedExperts

PendingAnswer = Pending


@dataclass(frozen=True)
class RetryPolicy:
    """Rules for retrying calls that ended UNAVAILABLE or RESOURCE_EXHAUSTED.

    The computation is pure, so retrying is always safe. The service names the pause before a retry (RetryInfo); if it names none,
    pauses double from 50 ms.

    Attributes:
        max_attempts: largest number of attempts, including the first one.
        max_pause: longest pause, in seconds.
        max_elapsed: seconds after which no further attempt starts.
    """

    max_attempts: int = 8
    max_pause: float = 2.0
    max_elapsed: float = 30.0


DEFAULT_RETRY = RetryPolicy()


@dataclass(frozen=True)
class Credentials:
    """Files with the client's credentials and those by which it checks the service. They are read when it connects.

    Attributes:
        ca: certificate authorities of the service, PEM; turns TLS on.
        cert: the client's certificate chain, PEM; needs `key`.
        key: the private key of that certificate, PEM.
        server_name: the name in the service's certificate, if it differs from the host of the address.
        token_file: file with the client's token, alone or as `NAME TOKEN`.
        insecure: send the token to another host without TLS as well, and let rows of network sessions leave this host.
    """

    ca: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    server_name: str | None = None
    token_file: str | os.PathLike[str] | None = None
    insecure: bool = False


def options(
    model: str = "",
    dtype: DType | None = None,
    topk_ids: Rows | None = None,
    topk_weights: Rows | None = None,
    token_ids: Rows | None = None,
    shared_experts: SharedExperts = "include",
    expected_weight_version: int | None = None,
    return_routing: bool = False,
    return_timings: bool = False,
) -> dict[str, Any]:
    """Optional arguments of `forward` for the native half."""
    return {
        "model": model,
        "dtype": dtype,
        "topk_ids": topk_ids,
        "topk_weights": topk_weights,
        "token_ids": token_ids,
        "shared_experts": shared_experts,
        "expected_weight_version": expected_weight_version,
        "return_routing": return_routing,
        "return_timings": return_timings,
    }


def native_client(
    address: Address,
    session: Session | None,
    retry: RetryPolicy | None,
    credentials: Credentials | None,
    on_graph_failure: GraphFailure = "abort",
    weights: str | None = None,
) -> NativeClient | CudaRoute:
    """The connection for the arguments that `Client` and `AsyncClient` share.

    Raises:
        UnsupportedError: `session` is "cuda", and torch is missing or sees no GPU.
        ValueError: the arguments do not go together.
    """
    given = address.split(",") if isinstance(address, str) else list(address)
    addresses = [part.strip() for part in given if part.strip()]
    if not addresses:
        raise ValueError("no address was given; pass HOST:PORT, unix:/PATH, or a list of them")
    check_session(session)
    if on_graph_failure not in ("abort", "raise"):
        raise ValueError(f'on_graph_failure is {on_graph_failure!r}; expected "abort" or "raise"')
    several = len(addresses) > 1 or not isinstance(address, str)
    is_local = session in ("host", "cuda")
    if is_local and len(addresses) > 1:
        raise ValueError(
            f'session="{session}" is with one service on this host, and {len(addresses)} addresses were given; pass one, or '
            "leave session out"
        )
    if is_local and credentials is not None:
        raise ValueError(
            f'session="{session}" takes no credentials, because the kernel tells the service the user of a session; leave credentials out'
        )
    if session == "cuda":
        from ._cuda import CudaRoute

        route: NativeClient | CudaRoute = CudaRoute(addresses[0], retry, on_graph_failure)
    else:
        route = NativeClient(addresses, several, session, retry, credentials)
    return route if weights is None else route.pinned(weights)


def check_session(session: str | None) -> None:
    """Raises for sessions that this process cannot open."""
    if session == "cuda":
        try:
            from ._cuda import require_gpu
        except ImportError as error:
            raise UnsupportedError(
                'session="cuda" needs torch with CUDA, whose tensors lie on a GPU: pip install torch, or pass session="host"'
            ) from error
        require_gpu()
    if session not in (None, "host", "cuda", "network"):
        raise ValueError(f'session is {session!r}; expected None, "host", "cuda" or "network"')


class Client:
    """A connection to one service, or to several used as one, for blocking calls.

    Threads may share it; the GIL is released while a call waits.

    Arguments:
        address: `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH`. A list of them, or one name with several addresses, means
            several services with one model: each call goes to one that holds its layer, and to another one if that fails.
            With session="host" or "cuda", `unix:/PATH` of the socket that the service got as `--session-listen`.
        session: None: rows travel over gRPC. "host": rows are copied into memory that the service on this host shares, and
            answers out of it. "cuda": rows are torch tensors on a GPU, or have DLPack, and calls are work of torch's current
            stream; the ranks of the service must be on GPUs of this host. "network": rows in host memory travel by one-sided writes
            over NIXL to a service that was started with `--network-listen`; the address is that of gRPC.
        retry: rules for retrying failed calls; None means no retries. Several services have rules of their own, of which
            `max_elapsed` sets how long a call without a timeout looks for a service.
        credentials: certificates and token; None means plaintext and no token. Sessions on this host take none. Network sessions beyond
            loopback need `insecure`, because their rows are neither encrypted nor authenticated.
        on_graph_failure: with `session="cuda"`, what happens when a call fails in a CUDA graph that is replayed, because the service is
            gone, for example. Replays raise no exception, and their outputs are NaN then. "abort": the process ends with a message on
            stderr and SIGABRT. "raise": `check` and `synchronize` raise the call's exception; the program calls one of them before it
            uses what a replay computed.
        expected_weight_fingerprint: calls raise `WeightVersionError` unless the weights with this fingerprint compute them
            (`client.model().weight_fingerprint`), also after a reload or a restart of the service. With `session="cuda"` the next call or
            `check` raises it. None: the client follows reloads.

    Raises:
        ConnectError: nothing answers at the address.
        AccessError: the service does not let this user open sessions.
        UnsupportedError: `session` is "cuda", and torch is missing or sees no GPU.
    """

    def __init__(
        self,
        address: Address,
        *,
        session: Session | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        credentials: Credentials | None = None,
        on_graph_failure: GraphFailure = "abort",
        expected_weight_fingerprint: str | None = None,
    ) -> None:
        self.address = address
        self._native = native_client(address, session, retry, credentials, on_graph_failure, expected_weight_fingerprint)
        self._native.connect()

    def forward(
        self,
        layer: int,
        rows: Rows,
        *,
        out: Rows | None = None,
        timeout: float | None = None,
        **arguments: Unpack[ForwardOptions],
    ) -> Answer | CudaAnswer:
        """Sends one token batch through one layer's MoE block.

        Arguments:
            layer: index of the decoder layer, as in the checkpoint's tensor names.
            rows: `[tokens, hidden]` in bf16, f16 or f32, row-major in host memory: anything with the buffer protocol
                (numpy, memoryview) or DLPack (torch). They must not be written to before the call returns. With
                `session="cuda"`, a torch tensor on a GPU, or another array there that has DLPack.
            out: an array of the shape and type of `rows` that receives the answer's rows; it becomes `answer.rows`. It may be
                `rows` itself, must be row-major, and must not be used before the call returns. None: new memory.
            timeout: seconds for the whole call, connecting and retries included; None means no limit. With `session="cuda"` for the
                service's work on the call, rounded up by a quarter at most, and for the time in which opening a session is retried.
            dtype: "bf16" or "f16" if `rows` are 16-bit integers that stand for it.
            topk_ids: `[tokens, k]` int32 or int64 expert ids, distinct within a row; the service applies them instead of
                running the gate.
            topk_weights: `[tokens, k]` floats, the factors of the experts' outputs; required with `topk_ids`.
            token_ids: `[tokens]` int32 or int64; required by layers that route by token id, ignored by others.
            shared_experts: "include" (default) or "exclude" them from the output.
            expected_weight_version: the call fails unless this version is loaded.
            return_routing: return `topk_ids` and `topk_weights` in the receipt.
            return_timings: return the phase timings of the call's steps in the receipt.
            model: name of the model; may be empty if only one is loaded.

        Returns:
            `answer.rows`, `[tokens, hidden]` in the dtype of `rows`, and `answer.receipt`. With `session="cuda"` the call returns
            before the GPU has computed it. A call that fails then leaves NaN in `answer.rows`, and the next call of the client, or
            `synchronize`, raises its exception.

        Raises:
            InvalidRequestError, NotFoundError, WeightVersionError, OverloadedError, DeadlineError, UnavailableError: the
                service refused the request or did not answer it.
            TypeError, ValueError, BufferError: an argument has the wrong type, shape or layout.
        """
        return self._native.forward(layer, rows, timeout, options(**arguments), out)

    def synchronize(self) -> None:
        """With `session="cuda"`: waits for the GPU's work, and raises the exception of a call that failed, if there is one.

        Calls of other clients have ended when they return.
        """
        if not isinstance(self._native, NativeClient):
            self._native.synchronize()

    def check(self) -> None:
        """With `session="cuda"`: as `synchronize`, without waiting for the GPU.

        The program has waited for the calls in question itself, with an event or by a copy to the host. Costs less than a microsecond.
        """
        if not isinstance(self._native, NativeClient):
            self._native.check()

    def stream(self, capacity: int = 64) -> Stream:
        """A stream that carries many calls at once. With several services, or a session, each call goes its own way.

        Arguments:
            capacity: calls that may wait in this process before they are sent on a gRPC stream.
        """
        return Stream(self._native.stream(capacity))

    def model(self, name: str = "") -> Model:
        """Dimensions, MoE layers, limits, placement and versions; an empty name means the loaded model.

        Of several services it has all layers and the smallest limits.
        """
        return self._native.model(name)

    def models(self) -> list[ModelSummary]:
        """The loaded models."""
        return self._native.models()

    def close(self) -> None:
        """Ends the client. Its connection closes when the last stream and call have ended."""
        self._native = _Closed()  # type: ignore[assignment]

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Stream:
    """Many calls in flight on one gRPC stream, each with its own answer or exception.

    A call that fails does not disturb the others. After a lost connection the stream is opened again, and calls that
    were under way are tried again as the client's RetryPolicy says.
    """

    def __init__(self, native: NativeStream) -> None:
        self._native = native

    def submit(self, layer: int, rows: Rows, *, timeout: float | None = None, **arguments: Unpack[ForwardOptions]) -> PendingAnswer:
        """Starts a call and returns without waiting; arguments as for `Client.forward`.

        `result()` of the returned object waits for the answer. `rows` must not be written to before it has returned.
        """
        return self._native.submit(layer, rows, timeout, options(**arguments))

    def close(self) -> None:
        """Lets calls in flight end and takes no more."""
        self._native.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Closed:
    """Stands for the connection of a closed client."""

    def __getattr__(self, name: str) -> Any:
        raise ValueError("the client is closed; make another one")
