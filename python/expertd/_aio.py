"""The client for `asyncio`."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import TYPE_CHECKING, Any, Unpack

from ._client import DEFAULT_RETRY, Credentials, RetryPolicy, _Closed, options, refuse_session
from ._native import NativeClient, NativeStream

if TYPE_CHECKING:
    from ._native import Answer, Model, ModelSummary
    from ._types import ForwardOptions, Rows


def settle(future: asyncio.Future[Any], result: Any, exception: BaseException | None = None) -> None:
    """Gives a future its result on the event loop's thread. A cancelled one takes none."""
    if future.done():
        return
    if exception is None:
        future.set_result(result)
    else:
        future.set_exception(exception)


class AsyncClient:
    """A connection to one service, for `asyncio`. The first call connects, as `async with` does.

    Any number of calls may be in flight. Cancelling the task that awaits a call cancels the call.

    Arguments:
        address: `HOST:PORT`, `http://HOST:PORT` or `unix:/PATH`.
        session: only None; "host" and "cuda" are refused, because the service has no sessions yet.
        retry: when failed calls are tried again; None means never.
        credentials: certificates and token; None means plaintext and no token.
    """

    def __init__(
        self,
        address: str,
        *,
        session: str | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        credentials: Credentials | None = None,
    ) -> None:
        refuse_session(session)
        self.address = address
        self._native = NativeClient(address, retry, credentials)

    async def connect(self) -> None:
        """Connects, if the client is not connected yet.

        Raises:
            ConnectError: nothing answers at the address.
        """
        await self._native.connect_async()

    async def forward(self, layer: int, rows: Rows, *, timeout: float | None = None, **arguments: Unpack[ForwardOptions]) -> Answer:
        """Sends one token batch through one layer's MoE block; arguments and result as for `Client.forward`."""
        return await self._native.forward_async(layer, rows, timeout, options(**arguments))

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
