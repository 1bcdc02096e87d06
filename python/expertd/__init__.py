"""Typed client for expertd, the service that runs Mixture-of-Experts blocks of real checkpoints.

    import numpy as np, expertd

    with expertd.serve("path/to/checkpoint") as service, service.client() as client:
        model = client.model()
        rows = np.random.standard_normal((8, model.hidden)).astype(np.float32)
        answer = client.forward(model.moe_layers[0].layer, rows)
        print(np.asarray(answer.rows).shape, answer.receipt.steps)

A token is one row of hidden states, `[hidden]`: after the layer's norm and before the residual. The answer has the MoE
block's output rows, shared experts included unless asked otherwise.
"""

from ._aio import AsyncClient, AsyncStream
from ._client import Client, Credentials, PendingAnswer, RetryPolicy, Stream
from ._errors import (
    AccessError,
    ConnectError,
    DeadlineError,
    ExpertdError,
    InternalError,
    InvalidRequestError,
    ModelMismatchError,
    NotFoundError,
    OverloadedError,
    ServiceError,
    UnavailableError,
    UnsupportedError,
    WeightVersionError,
)
from ._native import (
    Answer,
    Array,
    Limits,
    Model,
    ModelSummary,
    MoeLayer,
    RankPlacement,
    Receipt,
    StepTiming,
    __version__,
)
from ._serve import Service, command, serve

__all__ = [
    "AccessError",
    "Answer",
    "Array",
    "AsyncClient",
    "AsyncStream",
    "Client",
    "ConnectError",
    "Credentials",
    "DeadlineError",
    "ExpertdError",
    "InternalError",
    "InvalidRequestError",
    "Limits",
    "Model",
    "ModelMismatchError",
    "ModelSummary",
    "MoeLayer",
    "NotFoundError",
    "OverloadedError",
    "PendingAnswer",
    "RankPlacement",
    "Receipt",
    "RetryPolicy",
    "Service",
    "ServiceError",
    "StepTiming",
    "Stream",
    "UnavailableError",
    "UnsupportedError",
    "WeightVersionError",
    "__version__",
    "command",
    "serve",
]
