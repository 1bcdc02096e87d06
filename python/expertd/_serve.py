"""A service as a context manager, for notebooks and tests."""

from __future__ import annotations

import atexit
import collections
import ctypes
import functools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sysconfig
import tempfile
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ._client import DEFAULT_RETRY, Client, RetryPolicy
from ._errors import ServiceError, UnsupportedError

if TYPE_CHECKING:
    from ._types import GraphFailure, Session

_LOG_LINES = 200
_READY = re.compile(r"^ready: listening on (?P<address>[^,]+)(?:, [^,]+)*?, admin on (?P<admin>[^,]+), metrics on (?P<metrics>[^\s,]+)")
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def command() -> str:
    """Path of the `expertd` command: $EXPERTD_BINARY, otherwise the command in this package's wheel, otherwise the one on PATH.

    Raises:
        UnsupportedError: there is no such command.
    """
    if given := os.environ.get("EXPERTD_BINARY"):
        if os.access(given, os.X_OK):
            return given
        raise UnsupportedError(f"EXPERTD_BINARY is {given!r}, which is not an executable file; correct it or unset it")
    schemes = [None, *(s for s in ("posix_user", "posix_prefix") if s in sysconfig.get_scheme_names())]
    folders = [sysconfig.get_path("scripts", scheme) if scheme else sysconfig.get_path("scripts") for scheme in schemes]
    for folder in folders:
        path = pathlib.Path(folder) / "expertd"
        if os.access(path, os.X_OK):
            return str(path)
    if found := shutil.which("expertd"):
        return found
    raise UnsupportedError(
        f"there is no `expertd` command in {', '.join(dict.fromkeys(folders))} or on PATH; install the package from its "
        "wheel (pip install ./python), or set EXPERTD_BINARY"
    )


def serve(model: str | os.PathLike[str], *, ready_timeout: float = 600.0, **settings: Any) -> Service:
    """Starts `expertd serve` for a checkpoint and waits until it serves.

        with expertd.serve("path/to/checkpoint", ranks=2) as service:
            client = service.client()

    Arguments:
        model: folder of the checkpoint, in Hugging Face's layout.
        ready_timeout: seconds that loading may take.
        settings: any setting of `expertd serve --help` with underscores, such as `ranks=2`, `device="cpu"`,
            `listen="127.0.0.1:50051"`, `layers="0-11"`. By default the service, sessions and Admin listen on Unix-domain
            sockets in a temporary folder, and metrics on a free loopback port.

    Raises:
        ServiceError: the service ended before it was ready, or did not get ready in time; the message has the end of its
            log.
    """
    return Service(model, ready_timeout, settings)


class Service:
    """A running service. Leaving its `with` block, or `stop`, drains and ends it. It also ends with this process.

    Attributes:
        address: address of the public API.
        session_address: address for `Client(…, session="host")`.
        admin_address: address of Admin, for `expertd status --admin …`.
        metrics_url: the Prometheus endpoint.
        process: the service's process.
    """

    address: str
    session_address: str
    admin_address: str
    metrics_url: str
    process: subprocess.Popen[str]

    def __init__(self, model: str | os.PathLike[str], ready_timeout: float, settings: dict[str, Any]) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="expertd-", ignore_cleanup_errors=True)
        defaults = {
            "listen": f"unix:{self._folder.name}/api.sock",
            "session_listen": f"unix:{self._folder.name}/session.sock",
            "admin_listen": f"unix:{self._folder.name}/admin.sock",
            "metrics_listen": "127.0.0.1:0",
        }
        settings = {**defaults, **settings}
        self.session_address = str(settings["session_listen"])
        self._arguments = [command(), "serve", "--model", os.fspath(model)]
        for name, value in settings.items():
            self._arguments += ["--" + name.replace("_", "-"), str(value)]
        self._log: collections.deque[str] = collections.deque(maxlen=_LOG_LINES)
        self._changed = threading.Condition()
        self._state = "starting"
        self._spawn_error: OSError | None = None
        # The service gets a signal when the *thread* that started it ends, so this thread lives as long as the service.
        self._thread = threading.Thread(target=self._run, name="expertd-service", daemon=True)
        self._thread.start()
        try:
            self._wait_until_ready(time.monotonic() + ready_timeout)
        except BaseException:
            self.stop(timeout=2.0)
            raise
        atexit.register(self.stop)

    def _run(self) -> None:
        try:
            self.process = subprocess.Popen(
                self._arguments,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                preexec_fn=functools.partial(_end_with_parent, os.getpid()),
            )
        except OSError as error:
            self._spawn_error = error
            self._set_state("ended")
            return
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._log.append(line)
            if ready := _READY.match(line):
                self.address, self.admin_address, self.metrics_url = ready.group("address", "admin", "metrics")
                self._set_state("ready")
        self.process.wait()
        self._set_state("ended")

    def _set_state(self, state: str) -> None:
        with self._changed:
            self._state = state
            self._changed.notify_all()

    def _wait_until_ready(self, deadline: float) -> None:
        with self._changed:
            while self._state == "starting":
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ServiceError(f"the service was not ready in time; the end of its log:\n{self.log()}")
                self._changed.wait(min(left, 0.5))
            if self._state == "ready":
                return
        if self._spawn_error is not None:
            raise ServiceError(f"cannot start {self._arguments[0]}: {self._spawn_error}")
        code = self.process.returncode
        raise ServiceError(
            f"the service ended with exit status {code} before it was ready; the end of its log:\n{self.log()}",
            exit_code=code,
        )

    def client(
        self,
        *,
        session: Session | None = None,
        retry: RetryPolicy | None = DEFAULT_RETRY,
        on_graph_failure: GraphFailure = "abort",
    ) -> Client:
        """A client that is connected to this service."""
        address = self.session_address if session in ("host", "cuda") else self.address
        return Client(address, session=session, retry=retry, on_graph_failure=on_graph_failure)

    def log(self) -> str:
        """The last lines that the service printed."""
        return "".join(self._log)

    def stop(self, timeout: float = 30.0) -> None:
        """Drains the service and waits for its end; after `timeout` seconds it is killed."""
        atexit.unregister(self.stop)
        process = getattr(self, "process", None)
        if process is not None and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._thread.join(timeout=5.0)
        self._folder.cleanup()

    def __enter__(self) -> Service:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Service(address={getattr(self, 'address', None)!r}, state={self._state!r})"


def _end_with_parent(parent: int) -> None:
    # With SIGTERM the service would drain and log to a pipe that no one reads. SIGKILL ends it at once, and its ranks with it.
    _libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    # The kernel sends the signal for deaths from now on only.
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)
