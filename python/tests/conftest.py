"""Services from the installed wheel, over the checkpoints in tests/fixtures/golden."""

import contextlib
import pathlib

import numpy as np
import pytest
from safetensors.numpy import load_file

import expertd

GOLDEN = pathlib.Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "golden"


class Golden:
    """A running service and what transformers computed from the same checkpoint."""

    def __init__(self, family, service):
        self.service = service
        self.client = service.client()
        self.model = self.client.model()
        self.tensors = load_file(GOLDEN / family / "golden.safetensors")
        self.layers = [layer.layer for layer in self.model.moe_layers]

    def of(self, layer, name):
        return self.tensors[f"layers.{layer}.{name}"]

    def token_ids(self):
        return self.tensors["input_ids"].reshape(-1)


@pytest.fixture(scope="session")
def golden():
    """`golden(family)`: a service of two ranks, started when it is first asked for."""
    with contextlib.ExitStack() as stack:
        started = {}

        def of(family):
            if family not in started:
                service = stack.enter_context(expertd.serve(GOLDEN / family, ranks=2))
                started[family] = Golden(family, service)
            return started[family]

        yield of


@pytest.fixture
def rows(golden):
    """Eight random rows of the service `golden("qwen3_moe")`."""
    hidden = golden("qwen3_moe").model.hidden
    return np.random.default_rng().standard_normal((8, hidden)).astype(np.float32)


def worst_row(found, expected):
    """Largest relative L2 error of a row."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float((np.linalg.norm(found - expected, axis=1) / np.linalg.norm(expected, axis=1)).max())
