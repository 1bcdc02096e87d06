"""What only sessions do: they are opened again, grow, and wait for room."""

import concurrent.futures
import os
import pathlib
import socket
import subprocess
import threading

import numpy as np
import pytest
import seed
from conftest import recorded, stopped, worst_row

import expertd


def test_a_session_is_opened_again_when_the_service_is_back(tmp_path):
    settings = {"ranks": 1, "session_listen": f"unix:{tmp_path}/session.sock"}
    with expertd.serve(recorded("mixtral"), **settings) as service:
        # On a busy machine the service needs longer to be back than a client waits by default.
        client = service.client(session="host", retry=expertd.RetryPolicy(max_attempts=10_000, max_elapsed=300))
        model = client.model()
        layer = model.moe_layers[0].layer
        rows = seed.rng().standard_normal((3, model.hidden)).astype(np.float32)
        expected = np.asarray(client.forward(layer, rows).rows)
    back = threading.Event()

    def serve_again():
        with expertd.serve(recorded("mixtral"), **settings):
            back.wait()

    thread = threading.Thread(target=serve_again)
    thread.start()
    try:
        assert worst_row(client.forward(layer, rows).rows, expected) < 1e-5
        assert client.model().weight_fingerprint == model.weight_fingerprint
    finally:
        back.set()
        thread.join()


def test_calls_wait_for_room_in_the_session(started):
    it = started("qwen3_moe", "host")
    layer = it.layers[0]
    # More rows in flight than the memory of a new session holds, and more calls than its ring.
    tokens = it.model.limits.max_tokens_per_request
    small = [np.random.default_rng(i).standard_normal((tokens, it.model.hidden)).astype(np.float32) for i in range(4)]
    assert 100 * 2 * small[0].nbytes > 16 << 20
    expected = [np.asarray(it.client.forward(layer, rows).rows) for rows in small]
    # The service's queue is full at times, too.
    patient = expertd.RetryPolicy(max_attempts=10_000, max_elapsed=300)
    with it.service.client(session="host", retry=patient) as client, client.stream() as stream:
        pending = [stream.submit(layer, small[i % 4]) for i in range(100)]
        for i, one in enumerate(pending):
            assert worst_row(one.result().rows, expected[i % 4]) < 1e-5


def test_a_call_larger_than_a_new_sessions_memory(tmp_path):
    folder = tmp_path / "wide"
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--out", str(folder), "--layers", "1"]
    sizes = ["--hidden", "2048", "--width", "64", "--experts", "4", "--top-k", "2"]
    subprocess.run([*synth, *sizes], check=True, capture_output=True)
    with expertd.serve(folder, ranks=1) as service:
        host, grpc = service.client(session="host"), service.client()
        model = host.model()
        rows = seed.rng().standard_normal((1500, model.hidden)).astype(np.float32)
        assert 2 * rows.nbytes > 16 << 20
        layer = model.moe_layers[0].layer
        assert worst_row(host.forward(layer, rows).rows, grpc.forward(layer, rows).rows) < 1e-5
        assert worst_row(host.forward(layer, rows[:2]).rows, grpc.forward(layer, rows[:2]).rows) < 1e-5


def test_deadlines_hold_while_a_call_waits_for_room(started):
    it = started("qwen3_moe", "host")
    rows = np.zeros((2, it.model.hidden), np.float32)
    client = it.service.client(session="host", retry=None)
    # More calls than the ring has places.
    with stopped(it.service), concurrent.futures.ThreadPoolExecutor(80) as pool:
        calls = [pool.submit(client.forward, it.layers[0], rows, timeout=0.5) for _ in range(80)]
        for call in calls:
            with pytest.raises(expertd.DeadlineError):
                call.result()
    assert it.client.forward(it.layers[0], rows).rows.shape == rows.shape


def test_a_fork_that_drops_the_client_does_not_end_the_session(started):
    it = started("qwen3_moe", "host")
    rows = seed.rng().standard_normal((2, it.model.hidden)).astype(np.float32)
    with it.service.client(session="host", retry=None) as client:
        expected = np.asarray(client.forward(it.layers[0], rows).rows)
        child = os.fork()
        if child == 0:
            client.close()
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert worst_row(client.forward(it.layers[0], rows).rows, expected) < 1e-5


def test_a_socket_that_is_no_session_socket_is_named(started, tmp_path):
    it = started("qwen3_moe", "host")
    path = tmp_path / "silent"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        ended = threading.Thread(target=lambda: listener.accept()[0].close())
        ended.start()
        with pytest.raises(expertd.ConnectError, match="session-listen"):
            expertd.Client(f"unix:{path}", session="host")
        ended.join()
    assert pathlib.Path(it.service.session_address.removeprefix("unix:")).is_socket()


def test_another_user_is_refused(tmp_path):
    if os.geteuid() != 0:
        pytest.skip("changing the user needs root")
    tmp_path.chmod(0o755)
    for parent in tmp_path.parents[:2]:
        parent.chmod(0o755)
    program = f"import expertd; expertd.Client('unix:{tmp_path}/session.sock', session='host')"
    with expertd.serve(recorded("mixtral"), ranks=1, session_listen=f"unix:{tmp_path}/session.sock"):
        child = os.fork()
        if child == 0:
            os.setuid(12345)
            try:
                exec(program)
            except expertd.AccessError as error:
                os._exit(0 if "session-allow-uid" in str(error) else 2)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
