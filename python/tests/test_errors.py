"""Every cause has its exception, which says what was found and what to do."""

import asyncio
import os
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from conftest import recorded, stopped, worst_row

import expertd


def test_what_the_service_refuses(golden, rows):
    it = golden("qwen3_moe")
    layer = it.layers[0]
    with pytest.raises(expertd.NotFoundError, match="layer 99") as caught:
        it.client.forward(99, rows)
    assert (caught.value.code, caught.value.reason) == ("NOT_FOUND", "UNKNOWN_LAYER")
    with pytest.raises(expertd.NotFoundError, match="other"):
        it.client.forward(layer, rows, model="other")
    for other in (rows[:, :5].copy(), np.concatenate([rows, rows], axis=1)):
        with pytest.raises(expertd.InvalidRequestError, match="rows: have" if it.session else "inline") as caught:
            it.client.forward(layer, other)
        assert isinstance(caught.value, ValueError)
        assert it.session or caught.value.fields[0][0] == "inline"
    with pytest.raises(expertd.WeightVersionError, match="weight version 3") as caught:
        it.client.forward(layer, rows, expected_weight_version=3)
    assert caught.value.reason == "WEIGHT_VERSION_MISMATCH"
    ids = np.zeros((len(rows), 2), np.int32)
    with pytest.raises(expertd.InvalidRequestError, match="names expert 0 twice") as caught:
        it.client.forward(layer, rows, topk_ids=ids, topk_weights=np.ones((len(rows), 2), np.float32))
    assert caught.value.reason == "INVALID_REQUEST"
    assert [field for field, _ in caught.value.fields] == ["routing.topk_ids"]
    assert "names expert 0 twice" in caught.value.fields[0][1]


def test_what_no_request_can_be_made_of(golden, rows):
    client, layer = golden("qwen3_moe").client, golden("qwen3_moe").layers[0]
    ids, weights = np.zeros((len(rows), 1), np.int32), np.ones((len(rows), 1), np.float32)
    cases = [
        (TypeError, "list", lambda: client.forward(layer, [[1.0]])),
        (TypeError, "f64", lambda: client.forward(layer, rows.astype(np.float64))),
        (TypeError, "dtype says", lambda: client.forward(layer, rows, dtype="bf16")),
        (TypeError, "another type", lambda: client.forward(layer, rows.astype(">f4"))),
        (ValueError, r"\[tokens, hidden\]", lambda: client.forward(layer, rows[0])),
        (BufferError, "contiguous", lambda: client.forward(layer, rows[:, ::2])),
        (ValueError, "belong together", lambda: client.forward(layer, rows, topk_ids=ids)),
        (ValueError, "topk_weights", lambda: client.forward(layer, rows, topk_ids=ids, topk_weights=weights[:3])),
        (TypeError, "int32", lambda: client.forward(layer, rows, topk_ids=weights, topk_weights=weights)),
        (ValueError, "not an int32", lambda: client.forward(layer, rows, topk_ids=ids.astype(np.int64) + (1 << 40), topk_weights=weights)),
        (ValueError, "include", lambda: client.forward(layer, rows, shared_experts="some")),
        (ValueError, "positive", lambda: client.forward(layer, rows, timeout=0)),
        (TypeError, "unexpected keyword", lambda: client.forward(layer, rows, return_routings=True)),
    ]
    for kind, words, call in cases:
        with pytest.raises(kind, match=words):
            call()


def test_addresses_and_sessions():
    with pytest.raises(expertd.ConnectError, match="refused"):
        expertd.Client("127.0.0.1:1")
    with pytest.raises(ConnectionError, match="address"):
        expertd.Client("unix:")
    with pytest.raises(expertd.ConnectError, match="session-listen"):
        expertd.Client("127.0.0.1:1", session="host")
    with pytest.raises(expertd.ConnectError, match="session-listen"):
        expertd.Client("unix:/nowhere/session.sock", session="host")
    for words, arguments in (
        ("expected None", {"address": "unix:/x", "session": "gpu"}),
        ("one service", {"address": ["unix:/x", "unix:/y"], "session": "host"}),
        ("credentials", {"address": "unix:/x", "session": "host", "credentials": expertd.Credentials(token_file="x")}),
        ("no address", {"address": []}),
        ("no address", {"address": " , "}),
    ):
        with pytest.raises(ValueError, match=words):
            expertd.Client(**arguments)


def test_a_closed_client_says_so(golden, rows):
    it = golden("qwen3_moe")
    with it.service.client(session=it.session) as client:
        client.forward(it.layers[0], rows)
    with pytest.raises(ValueError, match="closed"):
        client.forward(it.layers[0], rows)


def test_a_deadline_passes_when_the_service_stands_still(golden, rows):
    it = golden("qwen3_moe")
    with stopped(it.service), pytest.raises(expertd.DeadlineError) as caught:
        it.client.forward(it.layers[0], rows, timeout=0.2)
    assert isinstance(caught.value, TimeoutError)


def test_a_waiting_call_lets_other_threads_run(golden, rows):
    it = golden("qwen3_moe")
    answers = []
    thread = threading.Thread(target=lambda: answers.append(it.client.forward(it.layers[0], rows)))
    with stopped(it.service):
        thread.start()
        # With the GIL held by the call, this thread would not get here, and nothing would ever wake the service.
    thread.join()
    assert answers[0].rows.shape == rows.shape


def test_a_signal_ends_a_waiting_call(golden, rows):
    it = golden("qwen3_moe")

    class Alarm(Exception):
        pass

    def ring(number, frame):
        raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        with stopped(it.service), pytest.raises(Alarm):
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            it.client.forward(it.layers[0], rows)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_clients_of_a_parent_are_refused_after_a_fork_and_new_ones_work(golden, rows):
    it = golden("qwen3_moe")
    layer, stream = it.layers[0], it.client.stream()
    asynchronous = expertd.AsyncClient(**it.arguments).stream()
    expected = np.asarray(it.client.forward(layer, rows).rows)
    with stopped(it.service):
        pending = stream.submit(layer, rows)
        calls = [
            lambda: it.client.forward(layer, rows),
            lambda: stream.submit(layer, rows),
            lambda: asyncio.run(asynchronous.forward(layer, rows)),
            pending.result,
        ]
        child = os.fork()
        if child == 0:
            refused = 0
            for call in calls:
                try:
                    call()
                except RuntimeError as error:
                    refused += "fork" in str(error)
            os._exit(refused)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    assert worst_row(pending.result().rows, expected) < 1e-5
    child = os.fork()
    if child == 0:
        try:
            fresh = expertd.Client(**it.arguments)
            is_right = it.session != "network" and worst_row(fresh.forward(layer, rows).rows, expected) < 1e-5
        except expertd.ExpertdError as error:
            # UCX does not survive a fork.
            is_right = it.session == "network" and "spawn" in str(error)
        os._exit(0 if is_right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert worst_row(it.client.forward(layer, rows).rows, expected) < 1e-5


def test_a_deadline_passes_while_another_call_connects(golden, rows):
    it = golden("qwen3_moe")

    async def calls():
        client = expertd.AsyncClient(**it.arguments)
        with stopped(it.service):
            connecting = asyncio.ensure_future(client.forward(it.layers[0], rows))
            for call in (client.forward, client.stream().forward):
                with pytest.raises(expertd.DeadlineError):
                    await call(it.layers[0], rows, timeout=0.2)
            assert not connecting.done()
        await connecting

    asyncio.run(calls())


def test_a_deadline_passes_while_a_session_is_opened(started, rows):
    it = started("qwen3_moe", "host")
    client = expertd.AsyncClient(**it.arguments, retry=None)
    with stopped(it.service), pytest.raises(expertd.DeadlineError):
        asyncio.run(client.forward(it.layers[0], rows, timeout=0.2))


@pytest.mark.parametrize("timeout", [1e12, 1e300, float("inf")])
def test_timeouts_beyond_the_range_of_clocks(golden, rows, timeout):
    it = golden("qwen3_moe")
    assert it.client.forward(it.layers[0], rows, timeout=timeout).rows.shape == rows.shape
    assert it.client.stream().submit(it.layers[0], rows, timeout=timeout).result().rows.shape == rows.shape

    async def call():
        async with expertd.AsyncClient(**it.arguments) as client:
            return await client.forward(it.layers[0], rows, timeout=timeout)

    assert asyncio.run(call()).rows.shape == rows.shape
    with pytest.raises(ValueError, match="positive"):
        it.client.forward(it.layers[0], rows, timeout=float("nan"))


def test_without_torch_cuda_sessions_are_refused():
    program = """
import sys
sys.modules["torch"] = None
import expertd
try:
    expertd.Client("unix:/tmp/none.sock", session="cuda")
except expertd.UnsupportedError as error:
    sys.exit(0 if "needs torch" in str(error) else str(error))
sys.exit("was not refused")
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


def test_asyncio_clients_of_cuda_sessions_are_refused():
    with pytest.raises(expertd.UnsupportedError, match="asyncio"):
        expertd.AsyncClient("unix:/tmp/none.sock", session="cuda")


def test_the_address_of_another_listener_is_a_connect_error():
    with expertd.serve(recorded("mixtral"), ranks=1) as service:
        with pytest.raises(expertd.ConnectError, match='session="host"'):
            expertd.Client(service.session_address, retry=None).model()
        with pytest.raises(expertd.ConnectError):
            expertd.Client(service.address, session="host", retry=None).model()
