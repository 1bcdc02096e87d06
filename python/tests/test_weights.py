"""Clients that expect certain weights, and clients that follow the service to others."""

import asyncio
import pickle
import subprocess
import threading

import numpy as np
import pytest
import seed
from conftest import worst_row

import expertd


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Two checkpoints of one shape with other weights."""
    root = tmp_path_factory.mktemp("weights")
    sizes = ["--hidden", "64", "--width", "32", "--experts", "8", "--top-k", "2", "--layers", "2"]
    for number in ("1", "2"):
        synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", str(root / number), "--seed", number]
        subprocess.run([*synth, *sizes], check=True, capture_output=True)
    return root / "1", root / "2"


def reload(service, folder=None):
    command = [expertd.command(), "reload", "--admin", service.admin_address]
    subprocess.run([*command, "--model", str(folder)] if folder else command, check=True, capture_output=True)


def of(service, session):
    return {"address": service.session_address if session else service.address, "session": session}


def check_refused(call, expected, found):
    with pytest.raises(expertd.WeightVersionError, match=f"{expected} are expected, {found} are loaded") as caught:
        call()
    assert caught.value.reason == "WEIGHT_VERSION_MISMATCH"


@pytest.mark.parametrize("session", [None, "host"], ids=["grpc", "host"])
def test_a_client_that_expects_weights_gets_no_answer_of_others(checkpoints, session):
    first, second = checkpoints
    rows = seed.rng().standard_normal((3, 64)).astype(np.float32)
    with expertd.serve(first, ranks=1) as service:
        follows = expertd.Client(**of(service, session))
        before = follows.model().weight_fingerprint
        arguments = {**of(service, session), "expected_weight_fingerprint": before}
        pinned = expertd.Client(**arguments)
        stream, out = pinned.stream(), np.zeros_like(rows)
        expected = np.asarray(follows.forward(0, rows).rows)
        assert worst_row(pinned.forward(0, rows).rows, expected) < 1e-5
        reload(service, second)
        now = follows.forward(0, rows).receipt.weight_fingerprint
        assert now != before

        async def through_asyncio():
            async with expertd.AsyncClient(**arguments) as client:
                await client.forward(0, rows)

        for call in (
            lambda: pinned.forward(0, rows),
            lambda: pinned.forward(0, rows, out=out),
            lambda: stream.submit(0, rows).result(),
            lambda: asyncio.run(through_asyncio()),
        ):
            check_refused(call, before, now)
        assert not out.any()
        reload(service, first)
        assert worst_row(stream.submit(0, rows).result().rows, expected) < 1e-5
        settings = {"listen": service.address, "session_listen": service.session_address}
        service.process.kill()
        service.process.wait()
        # Another service takes the addresses of the one that is gone.
        with expertd.serve(second, ranks=1, **settings):
            check_refused(lambda: pinned.forward(0, rows), before, now)
            assert follows.forward(0, rows).receipt.weight_fingerprint == now


@pytest.mark.parametrize("session", [None, "host"], ids=["grpc", "host"])
def test_a_new_version_of_the_same_weights_fails_no_call(checkpoints, session):
    rows = seed.rng().standard_normal((3, 64)).astype(np.float32)
    with expertd.serve(checkpoints[0], ranks=1) as service:
        model = service.client().model()
        client = expertd.Client(**of(service, session), expected_weight_fingerprint=model.weight_fingerprint)
        stopping, failed = threading.Event(), []

        def call(stream):
            try:
                while not stopping.is_set():
                    if stream is None:
                        client.forward(0, rows)
                    else:
                        stream.submit(0, rows).result()
            except expertd.ExpertdError as error:
                failed.append(error)

        threads = [threading.Thread(target=call, args=[stream]) for stream in [None] * 4 + [client.stream()] * 4]
        for thread in threads:
            thread.start()
        for _ in range(5):
            reload(service)
        stopping.set()
        for thread in threads:
            thread.join()
        assert not failed
        assert client.forward(0, rows).receipt.weight_version == model.weight_version + 5


def test_the_experts_of_a_model_are_those_that_it_was_loaded_with(checkpoints):
    torch = pytest.importorskip("torch", reason="modules of models are torch's")
    from expertd._torch import Remote

    first, second = checkpoints
    rows = torch.from_numpy(seed.rng().standard_normal((3, 64)).astype(np.float32))
    with expertd.serve(first, ranks=1) as service:
        pinned, follows = Remote(service.address), Remote(service.session_address, session="host", follows=True)
        before = pinned.model.weight_fingerprint
        pickled = pickle.dumps(pinned)
        assert pickle.loads(pickled).weights == before
        torch.testing.assert_close(pinned.call(0, rows), follows.call(0, rows))
        reload(service, second)
        now = service.client().model().weight_fingerprint
        follows.call(0, rows)
        for call in (lambda: pinned.call(0, rows), lambda: pickle.loads(pickled)):
            check_refused(call, before, now)
            with pytest.raises(expertd.WeightVersionError, match="expertd reload.*follow_weights=True"):
                call()
        assert pickle.loads(pickle.dumps(follows)).weights is None
