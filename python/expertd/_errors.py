"""Exceptions of the package, one per cause."""

from __future__ import annotations


class ExpertdError(Exception):
    """A call failed, or something that the package needs is missing.

    Attributes:
        code: name of the gRPC status, such as "UNAVAILABLE"; None if the failure is not a status.
        reason: the service's name for the cause, such as "OVERLOADED"; None if it gave none.
        fields: `(field, problem)` of each invalid field of a request.
        retry_after: seconds after which the service suggests a retry; None if it suggests none.
    """

    def __init__(
        self,
        message: str,
        *,
        code: str | None = None,
        reason: str | None = None,
        fields: list[tuple[str, str]] | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.fields = fields or []
        self.retry_after = retry_after


class ConnectError(ExpertdError, ConnectionError):
    """Nothing answers at the address, or the address is malformed."""


class InvalidRequestError(ExpertdError, ValueError):
    """The service refused the request's shape, type, routing or size; `fields` names the problems."""


class NotFoundError(ExpertdError, LookupError):
    """The service has no such model or layer."""


class WeightVersionError(ExpertdError):
    """The service holds other weights than `expected_weight_version` or `expected_weight_fingerprint` says."""


class OverloadedError(ExpertdError):
    """The service's queue was full, also after retries."""


class DeadlineError(ExpertdError, TimeoutError):
    """There was no answer within the timeout."""


class UnavailableError(ExpertdError, ConnectionError):
    """The service drained, was forming a new generation or was gone, also after retries. Retrying is always safe."""


class AccessError(ExpertdError, PermissionError):
    """The service requires a token or a certificate, or does not allow this call."""


class InternalError(ExpertdError):
    """The request ended its step alone, or the service has a bug. Retrying does not help."""


class UnsupportedError(ExpertdError, NotImplementedError):
    """This version of the package or of the service does not support the request."""


class ModelMismatchError(ExpertdError, ValueError):
    """The service holds a different model than the program loads."""


class ServiceError(ExpertdError, RuntimeError):
    """A service could not be started, or ended before it was ready.

    Attributes:
        exit_code: exit status of the process; None if it was still running. 64: bad setting or broken checkpoint; 65: weights
            could not be loaded; 69: an address could not be bound; 70: ranks kept failing; 71: a thread was lost.
    """

    def __init__(self, message: str, *, exit_code: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code


# The gRPC status codes of failed calls: name, exception, and advice to the caller if the message contains none.
_STATUSES: dict[int, tuple[str, type[ExpertdError], str]] = {
    1: ("CANCELLED", UnavailableError, ""),
    3: ("INVALID_ARGUMENT", InvalidRequestError, ""),
    4: ("DEADLINE_EXCEEDED", DeadlineError, "pass a larger timeout"),
    5: ("NOT_FOUND", NotFoundError, "client.model() lists what is served"),
    7: ("PERMISSION_DENIED", AccessError, ""),
    8: ("RESOURCE_EXHAUSTED", OverloadedError, "send fewer requests at once, or retry for longer (RetryPolicy)"),
    9: ("FAILED_PRECONDITION", WeightVersionError, "client.model() has the version and the fingerprint of the loaded ones"),
    12: ("UNIMPLEMENTED", UnsupportedError, "the address may belong to another kind of service"),
    13: ("INTERNAL", InternalError, ""),
    14: ("UNAVAILABLE", UnavailableError, "retry for longer (RetryPolicy), or see `expertd status`"),
    16: ("UNAUTHENTICATED", AccessError, ""),
}


def from_status(
    code: int,
    message: str,
    *,
    reason: str | None,
    fields: list[tuple[str, str]],
    retry_after: float | None,
) -> ExpertdError:
    """The exception for a gRPC status."""
    name, kind, advice = _STATUSES.get(code, (f"status {code}", InternalError, ""))
    text = f"{message} ({reason or name})"
    unsaid = [f"{field}: {problem}" for field, problem in fields if problem not in message]
    if unsaid:
        text += "; " + "; ".join(unsaid)
    if advice:
        text += f"; {advice}"
    return kind(text, code=name, reason=reason, fields=fields, retry_after=retry_after)


def connect_error(message: str) -> ConnectError:
    """The exception for an address that nothing answers at."""
    return ConnectError(message)
