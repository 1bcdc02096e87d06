"""Sessions in a GPU's memory. Without a GPU only a refusal runs."""

import os
import pathlib
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import expertd

torch = pytest.importorskip("torch", reason="CUDA sessions are for torch tensors")
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU and a service with GPU ranks")
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_session_is_refused():
    with pytest.raises(expertd.UnsupportedError, match="sees no GPU"):
        expertd.Client("unix:/tmp/none.sock", session="cuda")


def test_a_client_says_that_it_shares_a_gpu_without_mps(monkeypatch, tmp_path, caplog):
    from expertd._cuda import warn_of_sharing

    monkeypatch.setenv("CUDA_MPS_PIPE_DIRECTORY", str(tmp_path))
    warn_of_sharing(ranks=1, gpus=2)
    assert not caplog.text
    warn_of_sharing(ranks=2, gpus=2)
    assert f"no MPS daemon in {tmp_path}" in caplog.text
    caplog.clear()
    (tmp_path / "control").touch()
    warn_of_sharing(ranks=2, gpus=2)
    assert not caplog.text


class Served:
    def __init__(self, folder, **settings):
        self.service = expertd.serve(folder, device="cuda", ranks=1, **settings)
        self.client = self.service.client(session="cuda", on_graph_failure="raise")
        self.grpc = self.service.client()
        self.model = self.client.model()
        self.layers = [layer.layer for layer in self.model.moe_layers]
        # Another GPU than the rank's, if there is one.
        self.device = torch.device("cuda", torch.cuda.device_count() - 1)

    def rows(self, tokens, dtype=torch.bfloat16):
        return torch.randn(tokens, self.model.hidden, device=self.device).to(dtype)

    def expected(self, layer, rows, **arguments):
        return torch.from_dlpack(self.grpc.forward(layer, rows.cpu(), **arguments).rows).to(self.device)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cuda") / "model"
    sizes = ["--hidden", "256", "--width", "128", "--experts", "16", "--top-k", "4", "--layers", "3"]
    synth = [expertd.command(), "synth", "--family", "qwen2_moe", "--out", str(folder), *sizes]
    subprocess.run(synth, check=True, capture_output=True)
    return folder


@pytest.fixture(scope="module")
def served(checkpoint):
    served = Served(checkpoint, max_tokens_per_step=128, max_tokens_per_request=200)
    yield served
    served.service.stop()


def worst(found, expected):
    """Largest relative L2 error of a row."""
    found, expected = found.double(), expected.double()
    return ((found - expected).norm(dim=1) / expected.norm(dim=1)).max().item()


@gpu
@pytest.mark.parametrize("tokens", [1, 7, 64, 200, 333])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_answers_are_those_of_grpc(served, dtype, tokens):
    rows = served.rows(tokens, dtype)
    for layer in served.layers:
        for shared in ("include", "exclude"):
            answer = served.client.forward(layer, rows, shared_experts=shared)
            assert answer.rows.dtype == dtype and answer.rows.device == rows.device
            parts = [served.expected(layer, part, shared_experts=shared) for part in rows.split(200)]
            assert worst(answer.rows, torch.cat(parts)) < 2e-2
            receipt = answer.receipt
            assert receipt.weight_fingerprint == served.model.weight_fingerprint


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
def test_given_and_returned_routing(served, dtype, integers):
    for tokens in (1, 50, 333):
        rows = served.rows(tokens, dtype)
        for layer in served.layers:
            free = served.client.forward(layer, rows, return_routing=True)
            assert free.topk_ids.shape == free.topk_weights.shape == (tokens, 4)
            given = {"topk_ids": free.topk_ids.to(integers), "topk_weights": free.topk_weights}
            again = served.client.forward(layer, rows, **given)
            assert worst(again.rows, free.rows) < 2e-2
            ids = torch.argsort(torch.rand(tokens, 16, device=rows.device), dim=1)[:, :3].to(integers)
            given = {"topk_ids": ids, "topk_weights": torch.rand(tokens, 3, device=rows.device)}
            found = served.client.forward(layer, rows, return_routing=True, shared_experts="exclude", **given)
            parts = [
                served.expected(layer, rows[at], shared_experts="exclude", **{name: part[at].cpu() for name, part in given.items()})
                for at in (slice(start, start + 200) for start in range(0, tokens, 200))
            ]
            assert worst(found.rows, torch.cat(parts)) < 2e-2
            assert torch.equal(found.topk_ids, ids.int()) and torch.equal(found.topk_weights, given["topk_weights"])
    served.client.synchronize()


@gpu
def test_ids_out_of_range_fail_their_call(served):
    rows = served.rows(4)
    for wrong in (16, -2, 2**32):
        ids = torch.full((4, 1), wrong, device=rows.device)
        answer = served.client.forward(served.layers[0], rows, topk_ids=ids, topk_weights=torch.ones(4, 1, device=rows.device))
        with pytest.raises(expertd.InvalidRequestError, match="topk_ids|expert"):
            served.client.synchronize()
        assert answer.rows.isnan().all()


@gpu
def test_out_receives_the_rows(served):
    rows = served.rows(9)
    expected = served.client.forward(served.layers[0], rows).rows
    out = torch.zeros_like(rows)
    assert served.client.forward(served.layers[0], rows, out=out).rows.data_ptr() == out.data_ptr()
    assert torch.equal(out, expected)
    served.client.forward(served.layers[0], rows, out=rows)
    assert torch.equal(rows, expected)
    with pytest.raises(ValueError, match="out is"):
        served.client.forward(served.layers[0], rows, out=out[:4])
    with pytest.raises(ValueError, match="contiguous"):
        served.client.forward(served.layers[0], rows, out=torch.zeros(out.shape[::-1], dtype=out.dtype, device=out.device).T)


def shifted(tensor):
    """The same values one element further in memory, so that no wide load or store is aligned."""
    memory = torch.zeros(tensor.numel() + 1, dtype=tensor.dtype, device=tensor.device)
    return memory[1:].view(tensor.shape).copy_(tensor)


@gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_arrays_need_no_alignment(served, dtype):
    rows, layer = served.rows(70, dtype), served.layers[0]
    free = served.client.forward(layer, rows, return_routing=True)
    out = shifted(torch.zeros_like(rows))
    given = {"topk_ids": shifted(free.topk_ids.long()), "topk_weights": shifted(free.topk_weights.double())}
    for arguments in ({}, given, {"topk_ids": free.topk_ids, "topk_weights": shifted(free.topk_weights)}):
        served.client.forward(layer, shifted(rows), out=out, **arguments)
        assert worst(out, free.rows) < 2e-2
    served.client.forward(layer, shifted(rows), out=out, expected_weight_version=99)
    with pytest.raises(expertd.WeightVersionError):
        served.client.synchronize()
    assert out.isnan().all()


@gpu
def test_modules_get_nan_for_rows_whose_weights_are_not_finite(served):
    from expertd import _torch

    remote = _torch.Remote(served.service.session_address, session="cuda")
    layer = served.layers[0]
    for tokens in (5, 333):
        rows = served.rows(tokens)
        ids = torch.argsort(torch.rand(tokens, 16, device=rows.device), dim=1)[:, :3]
        for dtype in (torch.float32, *DTYPES):
            weights = torch.rand(tokens, 3, device=rows.device).to(dtype)
            expected = remote.call(layer, rows, ids, weights)
            assert not expected.isnan().any()
            for spoiled in (float("nan"), float("inf"), -float("inf")):
                weights[tokens - 2, 1] = spoiled
                with torch.no_grad():
                    found = remote.call(layer, rows.view(1, tokens, -1), ids.int(), weights)[0]
                assert found[tokens - 2].isnan().all()
                assert torch.equal(found[: tokens - 2], expected[: tokens - 2])
                assert torch.equal(found[tokens - 1 :], expected[tokens - 1 :])
    remote.client.synchronize()
    with pytest.raises(ValueError, match="expected \\[333, k\\]"):
        remote.call(layer, rows, ids[:4], weights[:4])
    with pytest.raises(ValueError, match="hidden size"):
        remote.call(layer, rows[:, :64])


@gpu
def test_a_graph_captures_calls_and_replays_them_with_other_rows(served):
    def walk(rows):
        for layer in served.layers:
            answer = served.client.forward(layer, rows, return_routing=True)
            routing = {"topk_ids": answer.topk_ids, "topk_weights": answer.topk_weights}
            rows = rows + answer.rows + served.client.forward(layer, rows, **routing).rows
        return rows

    static = served.rows(8)
    walk(static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(served.device), torch.cuda.graph(graph):
        found = walk(static)
    for _ in range(20):
        rows = served.rows(8)
        static.copy_(rows)
        graph.replay()
        assert torch.equal(found, walk(rows))
    served.client.synchronize()


@gpu
def test_a_compiled_function_calls_the_service(served):
    from expertd import _torch

    remote = _torch.Remote(served.service.session_address, session="cuda")
    layers = served.layers

    def block(rows):
        outputs = [_torch.moe(rows, None, None, None, remote.number, layer, True) for layer in layers]
        return rows.float() + sum(output.float() for output in outputs)

    rows = served.rows(16)
    with torch.no_grad():
        expected = block(rows)
        for mode in ("default", "reduce-overhead"):
            compiled = torch.compile(block, fullgraph=True, mode=mode)
            for _ in range(4):
                assert worst(compiled(rows), expected) < 1e-5


@gpu
def test_calls_of_several_streams_do_not_disturb_each_other(served):
    streams = [torch.cuda.Stream(served.device) for _ in range(4)]
    batches = [served.rows(5 + i) for i in range(len(streams))]
    layer = served.layers[0]
    expected = [served.client.forward(layer, rows).rows for rows in batches]
    torch.cuda.synchronize(served.device)
    for _ in range(50):
        found = []
        for stream, rows in zip(streams, batches, strict=True):
            with torch.cuda.stream(stream):
                found.append(served.client.forward(layer, rows).rows)
        torch.cuda.synchronize(served.device)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other)


@gpu
def test_a_failed_call_leaves_nan_and_raises_later(served):
    rows = served.rows(4)
    answer = served.client.forward(served.layers[0], rows, expected_weight_version=99)
    with pytest.raises(expertd.WeightVersionError, match="99"):
        served.client.synchronize()
    assert answer.rows.isnan().all()
    served.client.synchronize()
    answer = served.client.forward(served.layers[0], rows, expected_weight_version=99)
    torch.cuda.synchronize(served.device)
    with pytest.raises(expertd.WeightVersionError, match="99"):
        served.client.forward(served.layers[0], rows)
    assert not served.client.forward(served.layers[0], rows).rows.isnan().any()


@gpu
def test_what_sessions_do_not_do_is_refused(served):
    rows, layer = served.rows(4), served.layers[0]
    with pytest.raises(TypeError, match="must be on a GPU"):
        served.client.forward(layer, rows.cpu())
    with pytest.raises(TypeError, match="must be on a GPU"):
        served.client.forward(layer, np.zeros((4, served.model.hidden), np.float32))
    with pytest.raises(ValueError, match="hidden size"):
        served.client.forward(layer, rows[:, :64])
    with pytest.raises(expertd.NotFoundError, match="77"):
        served.client.forward(77, rows)
    with pytest.raises(expertd.UnsupportedError, match="streams"):
        served.client.stream()
    fresh = served.service.client(session="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(served.device):
        buffer = torch.zeros(4, device=served.device)
        with torch.cuda.graph(graph):
            buffer.add_(1)
            with pytest.raises(expertd.UnsupportedError, match="before the capture begins"):
                fresh.forward(layer, rows)


@gpu
def test_replays_survive_the_death_of_a_rank_and_end_with_the_service(checkpoint, monkeypatch):
    it = Served(checkpoint)
    lists = pathlib.Path(f"/proc/{it.service.process.pid}/task").glob("*/children")
    rank = max(int(child) for path in lists for child in path.read_text().split())
    static = it.rows(8)
    expected = it.client.forward(it.layers[0], static).rows
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(it.device), torch.cuda.graph(graph):
        found = it.client.forward(it.layers[0], static).rows
    generation = it.grpc.model().generation
    os.kill(rank, signal.SIGKILL)
    for _ in range(50):
        graph.replay()
        torch.cuda.synchronize(it.device)
        assert worst(found, expected) < 2e-2
    it.client.synchronize()
    assert it.grpc.model().generation > generation
    it.service.process.kill()
    graph.replay()
    torch.cuda.synchronize(it.device)
    assert found.isnan().all()
    with pytest.raises(expertd.UnavailableError):
        it.client.synchronize()
    monkeypatch.setattr(it.client._native, "retry", expertd.RetryPolicy(max_attempts=2, max_elapsed=1.0))
    with pytest.raises(expertd.ExpertdError):
        it.client.forward(it.layers[0], static)
    with pytest.raises(expertd.ExpertdError):
        it.client.forward(it.layers[0], static)
    # The client holds that session no longer, and its graph still replays.
    it.client.check()
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize(it.device)
        with pytest.raises(expertd.UnavailableError):
            it.client.check()
        it.client.check()
    it.service.stop()


def captured(it, rows):
    """A graph of calls of all layers, and its output."""

    def walk():
        found = rows
        for layer in it.layers:
            found = found + it.client.forward(layer, found).rows
        return found

    expected = walk().clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(it.device), torch.cuda.graph(graph):
        found = walk()
    return graph, found, expected


@gpu
@pytest.mark.parametrize("order", ["before a replay", "in a replay", "at any time", "in a replay, stopped first"])
def test_no_result_of_a_replay_is_used_when_the_service_was_killed(checkpoint, order):
    it = Served(checkpoint)
    graph, found, expected = captured(it, it.rows(8))
    event = torch.cuda.Event(blocking=True)
    killed, used = False, 0
    if order == "at any time":
        threading.Timer(0.3, it.service.process.kill).start()
    for replay in range(1_000_000):
        if replay == 20 and order == "before a replay":
            it.service.process.kill()
            it.service.process.wait()
        if replay == 20 and order == "in a replay, stopped first":
            os.kill(it.service.process.pid, signal.SIGSTOP)
        graph.replay()
        event.record(torch.cuda.current_stream(it.device))
        if replay == 20 and order == "in a replay, stopped first":
            time.sleep(0.2)
            assert not event.query()
        if replay == 20 and order.startswith("in a replay"):
            it.service.process.kill()
        event.synchronize()
        try:
            it.client.check()
        except expertd.UnavailableError:
            killed = True
            break
        assert torch.equal(found, expected)
        used += 1
    assert killed and used >= 20
    # Engines check from several threads.
    for _ in range(3):
        with pytest.raises(expertd.UnavailableError):
            it.client._native.verify()
        graph.replay()
        event.record(torch.cuda.current_stream(it.device))
        event.synchronize()
        with pytest.raises(expertd.UnavailableError):
            it.client.check()
    it.service.stop()


@gpu
def test_a_call_that_the_service_refuses_in_a_replay_is_raised_for_each_replay(served):
    rows = served.rows(4)
    served.client.forward(served.layers[0], rows, expected_weight_version=99)
    with pytest.raises(expertd.WeightVersionError):
        served.client.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(served.device), torch.cuda.graph(graph):
        right = served.client.forward(served.layers[0], rows).rows
        wrong = served.client.forward(served.layers[0], rows, expected_weight_version=99).rows
    for _ in range(20):
        graph.replay()
        assert wrong.isnan().cpu().all() and not right.isnan().cpu().any()
        with pytest.raises(expertd.WeightVersionError, match="99"):
            served.client.check()
        served.client.check()


@gpu
def test_a_client_that_expects_weights_finds_calls_of_others_also_in_graphs(checkpoint, tmp_path):
    sizes = ["--hidden", "256", "--width", "128", "--experts", "16", "--top-k", "4", "--layers", "3", "--seed", "7"]
    synth = [expertd.command(), "synth", "--family", "qwen2_moe", "--out", str(tmp_path / "other"), *sizes]
    subprocess.run(synth, check=True, capture_output=True)
    it = Served(checkpoint)
    expected = it.model.weight_fingerprint
    pinned = expertd.Client(
        it.service.session_address, session="cuda", on_graph_failure="raise", expected_weight_fingerprint=expected
    )
    layer, rows = it.layers[0], it.rows(4)

    def reload(folder):
        subprocess.run([expertd.command(), "reload", "--admin", it.service.admin_address, "--model", str(folder)], check=True)

    def replay():
        graph.replay()
        torch.cuda.synchronize(it.device)

    pinned.forward(layer, rows)
    pinned.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.device(it.device), torch.cuda.graph(graph):
        pinned.forward(layer, rows)
    others_were_found = False
    for folder in (checkpoint, tmp_path / "other", checkpoint):
        reload(folder)
        replay()
        if folder == checkpoint:
            pinned.check()
            if others_were_found:
                with pytest.raises(expertd.WeightVersionError):
                    pinned._native.verify()
            else:
                pinned._native.verify()
            pinned.forward(layer, rows)
            pinned.synchronize()
            continue
        others_were_found = True
        with pytest.raises(expertd.WeightVersionError, match=f"{expected} are expected"):
            pinned.check()
        pinned.check()
        for _ in range(2):
            with pytest.raises(expertd.WeightVersionError):
                pinned._native.verify()
        pinned.forward(layer, rows)
        with pytest.raises(expertd.WeightVersionError):
            pinned.synchronize()
        it.client.forward(layer, rows)
        it.client.synchronize()
    it.service.stop()


PROGRAM = """
import sys, time, torch, expertd
address, layer, hidden, version = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
client = expertd.Client(address, session="cuda")
rows = torch.randn(8, hidden, device="cuda").bfloat16()
expected = client.forward(layer, rows).rows
if version:
    try:
        client.forward(layer, rows, expected_weight_version=int(version))
        client.synchronize()
    except expertd.WeightVersionError:
        pass
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    found = client.forward(layer, rows, expected_weight_version=int(version) if version else None).rows
print("captured", flush=True)
for _ in range(20_000):
    graph.replay()
    print("right" if torch.equal(found, expected) else "WRONG", flush=True)
    time.sleep(0.002)
"""


@gpu
@pytest.mark.parametrize("cause", ["killed", "refused"])
def test_a_program_that_checks_nothing_ends_when_a_call_of_its_graph_fails(checkpoint, cause):
    it = Served(checkpoint)
    arguments = [it.service.session_address, str(it.layers[0]), str(it.model.hidden), "99" if cause == "refused" else ""]
    program = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout.readline() == "captured\n"
    if cause == "killed":
        assert [program.stdout.readline() for _ in range(20)] == ["right\n"] * 20
        it.service.process.kill()
    out, err = program.communicate(timeout=60)
    assert program.returncode == -signal.SIGABRT, (program.returncode, out[-500:], err[-2000:])
    assert "on_graph_failure" in err and ("socket" in err if cause == "killed" else "99" in err)
    if cause == "killed":
        assert set(out.split()) <= {"right"}
    # The service lets the stream of a refused call go on; the process ends a millisecond later.
    assert cause == "killed" or len(out.split()) <= 10
    it.service.stop()
