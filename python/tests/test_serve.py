"""Services as context managers, and the command that the wheel brings along."""

import os
import pathlib
import select
import signal
import subprocess
import sys
import sysconfig
import textwrap

import numpy as np
import pytest
from conftest import recorded

import expertd
from expertd._serve import _end_with_parent


def test_the_command_is_the_one_of_the_wheel():
    assert pathlib.Path(expertd.command()) == pathlib.Path(sysconfig.get_path("scripts")) / "expertd"
    printed = subprocess.run([expertd.command(), "--version"], capture_output=True, text=True, check=True).stdout
    assert printed.split()[:2] == ["expertd", expertd.__version__]


def test_the_wheel_has_the_licences_of_what_it_contains():
    folder = pathlib.Path(sysconfig.get_path("data")) / "share/doc/expertd"
    assert "Apache License" in (folder / "LICENSE").read_text()
    notices = (folder / "THIRD-PARTY.md").read_text()
    assert "| tonic |" in notices and "| pyo3 |" in notices and "Permission is hereby granted" in notices


def test_a_service_ends_with_its_block():
    with expertd.serve(recorded("mixtral"), ranks=1) as service:
        assert service.process.poll() is None
        status = [expertd.command(), "status", "--admin", service.admin_address]
        assert "serving" in subprocess.run(status, capture_output=True, text=True, check=True).stdout.lower()
        socket = pathlib.Path(service.address.removeprefix("unix:"))
        assert socket.exists()
    assert service.process.returncode == 0 and not socket.exists()


def test_a_service_that_cannot_start_says_why(tmp_path):
    with pytest.raises(expertd.ServiceError, match="config.json") as caught:
        expertd.serve(tmp_path / "nothing")
    assert caught.value.exit_code == 64
    with pytest.raises(expertd.ServiceError, match="no-such-setting"):
        expertd.serve(recorded("mixtral"), no_such_setting=1)
    with pytest.raises(expertd.ServiceError, match="not ready in time"):
        expertd.serve(recorded("mixtral"), ranks=1, ready_timeout=1e-6)


def test_a_command_that_is_not_there_is_named(monkeypatch):
    monkeypatch.setenv("EXPERTD_BINARY", "/nowhere/expertd")
    with pytest.raises(expertd.UnsupportedError, match="EXPERTD_BINARY"):
        expertd.command()


def test_a_service_ends_with_the_process_that_started_it():
    program = textwrap.dedent(f"""
        import expertd, os, signal, threading
        box = []
        # The thread that starts the service ends before the process does.
        thread = threading.Thread(target=lambda: box.append(expertd.serve({str(recorded("mixtral"))!r}, ranks=1)))
        thread.start()
        thread.join()
        print(box[0].process.pid, box[0].process.poll(), flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert printed.returncode == -signal.SIGKILL, printed.stderr
    pid, state = printed.stdout.split()
    assert state == "None"
    try:
        handle = os.pidfd_open(int(pid))
    except ProcessLookupError:
        return
    assert select.select([handle], [], [], 60)[0], "the service still runs"


def test_two_services_do_not_meet():
    with expertd.serve(recorded("mixtral"), ranks=1) as one, expertd.serve(recorded("olmoe"), ranks=1) as other:
        families = [service.client().model().family for service in (one, other)]
        assert families == ["mixtral", "olmoe"]
        rows = np.zeros((2, one.client().model().hidden), np.float32)
        assert one.client().forward(one.client().model().moe_layers[0].layer, rows).rows.shape == rows.shape


def test_a_service_with_tokens_wants_one(tmp_path):
    tokens, mine = tmp_path / "tokens", tmp_path / "mine"
    secret = "a-token-that-is-long-enough-for-a-test-0123456789"
    tokens.write_text(f"tester {secret}\n")
    tokens.chmod(0o600)
    mine.write_text(secret + "\n")
    with expertd.serve(recorded("mixtral"), ranks=1, listen="127.0.0.1:0", token_file=tokens) as service:
        with pytest.raises(expertd.AccessError) as caught:
            expertd.Client(service.address)
        assert caught.value.code == "UNAUTHENTICATED"
        client = expertd.Client(service.address, credentials=expertd.Credentials(token_file=mine))
        assert client.model().family == "mixtral"
        with pytest.raises(expertd.ConnectError, match="nowhere"):
            expertd.Client(service.address, credentials=expertd.Credentials(token_file="/nowhere"))


@pytest.mark.parametrize(("parent_lives", "signal_number"), [(True, 0), (False, signal.SIGKILL)])
def test_a_service_whose_parent_died_before_it_began_ends(parent_lives, signal_number):
    own = os.getpid()
    child = os.fork()
    if child == 0:
        _end_with_parent(own if parent_lives else own + 1)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == signal_number
