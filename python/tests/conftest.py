"""Services from the installed wheel, over the recorded checkpoints in tests/fixtures."""

import contextlib
import os
import pathlib
import signal
import time

import numpy as np
import pytest
from safetensors.numpy import load_file

import expertd
import recorded_checkpoints
import seed


# Settings of services, and the ways to them.
NETWORK = {"network_listen": "127.0.0.1"} if os.environ.get("EXPERTD_NIXL") else {}
WAYS = [None, "host", *(["network"] if NETWORK else [])]


def recorded(family):
    """The folder of a family's checkpoint and recordings."""
    return recorded_checkpoints.folder(f"golden/{family}")


def pytest_report_header():
    return f"EXPERTD_TEST_SEED={seed.SEED}"


class Golden:
    """A running service, a client of it, and what transformers computed from the same checkpoint.

    `arguments` are those of `Client` and `AsyncClient` that lead to the service the same way as `client`. Network sessions need NIXL, whose
    folder `EXPERTD_NIXL` names.
    """

    def __init__(self, family, service, session):
        self.service = service
        self.session = session
        self.client = service.client(session=session)
        self.arguments = {"address": service.session_address if session == "host" else service.address, "session": session}
        self.model = self.client.model()
        self.tensors = load_file(recorded(family) / "golden.safetensors")
        self.layers = [layer.layer for layer in self.model.moe_layers]

    def of(self, layer, name):
        return self.tensors[f"layers.{layer}.{name}"]

    def token_ids(self):
        return self.tensors["input_ids"].reshape(-1)


@pytest.fixture(scope="session")
def started():
    """`started(family, session)`: a service of two ranks, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        services = {}
        ready = {}

        def of(family, session):
            if family not in services:
                services[family] = stack.enter_context(expertd.serve(recorded(family), ranks=2, **NETWORK))
            if (family, session) not in ready:
                ready[family, session] = Golden(family, services[family], session)
            return ready[family, session]

        yield of


@pytest.fixture(params=WAYS, ids=["grpc", *WAYS[1:]])
def golden(request, started):
    """`golden(family)`: a service with a client over gRPC, and with clients over sessions."""
    return lambda family: started(family, request.param)


@pytest.fixture
def rows(golden):
    """Eight random rows of the service `golden("qwen3_moe")`."""
    hidden = golden("qwen3_moe").model.hidden
    return seed.rng().standard_normal((8, hidden)).astype(np.float32)


@contextlib.contextmanager
def stopped(service):
    """Stops the service's process for the length of the block, which begins when all its threads stand still."""
    tasks = pathlib.Path(f"/proc/{service.process.pid}/task")
    os.kill(service.process.pid, signal.SIGSTOP)
    try:
        while any(stat.read_text().rpartition(")")[2].split()[0] != "T" for stat in tasks.glob("*/stat")):
            time.sleep(0.001)
        yield
    finally:
        os.kill(service.process.pid, signal.SIGCONT)


def worst_row(found, expected):
    """Largest relative L2 error of a row."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())
