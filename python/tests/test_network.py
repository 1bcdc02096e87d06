"""What only network sessions do. They need NIXL: `EXPERTD_NIXL` names its folder."""

import re
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
import seed
from conftest import NETWORK, recorded, worst_row

import expertd

pytestmark = pytest.mark.skipif(not NETWORK, reason="EXPERTD_NIXL is not set")


def rows_of(model, count=4):
    return seed.rng().standard_normal((count, model.hidden)).astype(np.float32)


def test_a_session_is_opened_again_after_the_service_was_restarted(tmp_path):
    settings = {"ranks": 1, "listen": f"unix:{tmp_path}/api.sock", **NETWORK}
    with expertd.serve(recorded("mixtral"), **settings) as service:
        client = service.client(session="network")
        model = client.model()
        rows = rows_of(model)
        expected = np.asarray(client.forward(model.moe_layers[0].layer, rows).rows)
    with pytest.raises((expertd.DeadlineError, expertd.UnavailableError)):
        client.forward(model.moe_layers[0].layer, rows, timeout=0.5)
    with expertd.serve(recorded("mixtral"), **settings):
        assert worst_row(client.forward(model.moe_layers[0].layer, rows).rows, expected) < 1e-5


def sessions_of(service):
    with urllib.request.urlopen(service.metrics_url) as page:
        return int(re.search(r"^expertd_sessions(?:{[^}]*})? (\d+)", page.read().decode(), re.M)[1])


def test_services_used_as_one(tmp_path):
    held = [{"layers": layers, "ranks": 1, **NETWORK} for layers in ("0-1", "2-3")]
    with expertd.serve(recorded("qwen3_next"), **held[0]) as first, expertd.serve(recorded("qwen3_next"), **held[1]) as second:
        client = expertd.Client([first.address, second.address], session="network")
        rows = rows_of(client.model())
        for layer, service in [(0, first), (3, second)]:
            assert worst_row(client.forward(layer, rows).rows, service.client().forward(layer, rows).rows) < 1e-6
            end = time.monotonic() + 120
            while (sessions := sessions_of(service)) == 0 and time.monotonic() < end:
                # A session that does not open in time sends calls over gRPC meanwhile.
                client.forward(layer, rows)
            assert sessions == 1


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    with pytest.raises(expertd.UnsupportedError, match="insecure=True"):
        expertd.Client("192.0.2.1:50051", session="network")
    with pytest.raises(expertd.ConnectError, match=r"nobody\.sock"):
        expertd.Client(f"unix:{tmp_path}/nobody.sock", session="network", retry=None)
    with expertd.serve(recorded("mixtral"), ranks=1) as service:
        with pytest.raises(expertd.ConnectError, match="--network-listen"):
            service.client(session="network", retry=None)
        monkeypatch.setenv("EXPERTD_NIXL", str(tmp_path))
        with pytest.raises(expertd.UnsupportedError, match="pip install nixl-cu13"):
            service.client(session="network")


# A client that makes calls, and ends as programs end: closed, dropped, or still there; in the middle of a call; in a fork.
PROGRAM = """
import os, sys, threading
import numpy as np
import expertd

client = expertd.Client(sys.argv[1], session="network", retry=None)
model = client.model()
rows = np.ones((4, model.hidden), np.float32)
layer = model.moe_layers[0].layer
client.forward(layer, rows)
how = sys.argv[2]
if how == "closed":
    client.close()
elif how == "kept":
    sys.kept = client
elif how == "calling":
    started = threading.Event()
    def call():
        while True:
            client.forward(layer, rows)
            started.set()
    threading.Thread(target=call, daemon=True).start()
    started.wait()
elif how == "fork":
    child = os.fork()
    if child == 0:
        try:
            client.forward(layer, rows)
        except RuntimeError as error:
            os._exit(0 if "fork" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    client.forward(layer, rows)
print("done", flush=True)
"""


@pytest.mark.parametrize("how", ["closed", "kept", "calling", "fork"])
def test_programs_end_in_order(started, how, tmp_path):
    it = started("mixtral", "network")
    for _ in range(5):
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, it.service.address, how], capture_output=True, text=True, timeout=300, cwd=tmp_path
        )
        assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr
