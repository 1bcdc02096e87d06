"""The client for `asyncio`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from ._client import DEFAULT_RETRY, Credentials, RetryPolicy, _Closed, native_client, options
from ._errors import UnsupportedError
from ._native import NativeClient, NativeStream

if TYPE_CHECKING:
    from ._native import Answer, Model, ModelSummary
    from ._types import Address, ForwardOptions, Rows, Session


def settle(future: asyncio.Future[Any], result: Any, exception: BaseException | None = None) -> None:
    """Gives a future its result on the event loop's thread. A cancelled one takes none."""
    if future.done():
        return
    if exception is None:
        future.set_result(result)
    else:
        future.set_exception(exception)


class AsyncClient:
    """A connection to one service, or to several used as one, for `asyncio`. The first call connects, as `async with` does.

    Any number of calls may be in flight. Cancelling the task that awaits a call cancels the call. Each call of a session
    occupies a thread of this process while it is in flight.

    Arguments are those of `Client`.
    """

    def __init__(
        self,
        address: Address,
        *,
        session: Session | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        credentials: Credentials | None = None,
        expected_weight_fingerprint: str | None = None,
    ) -> None:
        self.address = address
        if session == "cuda":
            raise UnsupportedError(
                'session="cuda" has no asyncio client, because calls on a GPU do not block: use expertd.Client'
            )
        native = native_client(address, session, retry, credentials, weights=expected_weight_fingerprint)
        assert isinstance(native, NativeClient)
        self._native = native

    async def connect(self) -> None:
        """Connects, if the client is not connected yet.

        Raises:
            ConnectError: nothing answers at the address.
        """
        await self._native.connect_async()

    async def forward(
        self,
        layer: int,
        rows: Rows,
        *,
        out: Rows | None = None,
        timeout: float | None = None,
        **arguments: Unpack[ForwardOptions],
    ) -> Answer:
        """Sends one token batch through one layer's MoE block; arguments and result as for `Client.forward`.

        `out` must not be used before the call has returned or has raised, `CancelledError` included. Nothing is written to
        it from then on.
        """
        return await self._native.forward_async(layer, rows, timeout, options(**arguments), out)

    def stream(self, capacity: int = 64) -> AsyncStream:
        """A stream that carries many calls at once; `capacity` calls may wait in this process before they are sent."""
        return AsyncStream(self._native.stream(capacity))

    async def model(self, name: str = "") -> Model:
        """Dimensions, MoE layers, limits, placement and versions; an empty name means the loaded model."""
        return await self._native.model_async(name)

    async def models(self) -> list[ModelSummary]:
        """The loaded models."""
        return await self._native.models_async()

    async def close(self) -> None:
        """Ends the client. Its connection closes when the last stream and call have ended."""
        self._native = _Closed()  # type: ignore[assignment]

    async def __aenter__(self) -> AsyncClient:
        await self.connect()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncStream:
    """Many calls in flight on one gRPC stream, each with its own answer or exception."""

    def __init__(self, native: NativeStream) -> None:
        self._native = native

    async def forward(self, layer: int, rows: Rows, *, timeout: float | None = None, **arguments: Unpack[ForwardOptions]) -> Answer:
        """One call of the stream; arguments and result as for `Client.forward`."""
        return await self._native.forward_async(layer, rows, timeout, options(**arguments))

    async def close(self) -> None:
        """Lets calls in flight end and takes no more."""
        self._native.close()

    async def __aenter__(self) -> AsyncStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
