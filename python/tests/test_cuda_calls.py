"""Calls of CUDA sessions as far as they need no GPU: tensors lie in host memory, and the native half is a stand-in."""

import importlib
import threading
import types

import pytest
import seed

import expertd

torch = pytest.importorskip("torch", reason="CUDA sessions are for torch tensors")
HIDDEN, LAYERS, K = 8, 6, 2


class Native:
    """The native half of a session: what was prepared, and what was called."""

    def __init__(self, *arguments):
        self.arguments, self.prepared, self.calls, self.ended = arguments, [], [], False

    def prepare(self, calls):
        self.prepared += calls
        return [types.SimpleNamespace(call=lambda *call: self.calls.append(call) or len(self.calls)) for _ in calls]

    def has_ended(self):
        return self.ended

    def is_kept(self):
        return False

    def check(self):
        pass


@pytest.fixture
def route(monkeypatch):
    # By name: a test with a stand-in for torch leaves its modules as attributes of the package.
    _cuda, _cuda_session = (importlib.import_module(f"expertd.{name}") for name in ("_cuda", "_cuda_session"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(_cuda_session, "NativeCudaSession", Native)
    monkeypatch.setattr(_cuda_session, "current_stream", lambda device: 0)
    monkeypatch.setattr(_cuda, "_tensor", lambda rows, what: rows)
    monkeypatch.setattr(_cuda, "warn_of_sharing", lambda ranks, gpus: None)
    route = _cuda.CudaRoute("unix:/nowhere.sock", None, "raise")
    layers = [types.SimpleNamespace(layer=n, top_k=K, max_k=K, routes_by_token_id=False) for n in range(LAYERS)]
    limits = types.SimpleNamespace(max_tokens_per_request=64)
    model = types.SimpleNamespace(
        name="m", hidden=HIDDEN, limits=limits, moe_layers=layers, placement=[], weight_fingerprint="sampled:01"
    )
    route._host = types.SimpleNamespace(model=lambda name: model)
    return route


def options(**given):
    from expertd._client import options

    return options(**given)


def test_calls_with_many_timeouts_prepare_few_calls(route):
    rows, random = torch.zeros(3, HIDDEN), seed.rng()
    timeouts = [float(t) for t in 10 ** random.uniform(-3, 3, 2_000)] + [1e-9, 1e9, float("inf")]
    for timeout in timeouts:
        route.forward(int(random.integers(LAYERS)), rows, timeout, options())
    native = route._session(-1).native
    # Four numbers between powers of two.
    assert len(native.prepared) <= LAYERS * 4 * 24
    assert len(native.calls) == len(timeouts)
    prepared = [call["timeout_us"] for call in native.prepared]
    for timeout in timeouts[:-3]:
        exact = int(timeout * 1e6)
        assert any(exact <= found <= exact * 1.25 + 1 for found in prepared)
    assert 0 < min(prepared) and max(prepared) < 1.25e6 * 366 * 24 * 3600


def test_a_call_without_a_timeout_prepares_all_layers(route):
    route.forward(1, torch.zeros(3, HIDDEN), None, options())
    assert [call["layer"] for call in route._session(-1).native.prepared] == list(range(LAYERS))
    route.forward(1, torch.zeros(3, HIDDEN), 1.0, options())
    assert len(route._session(-1).native.prepared) == LAYERS + 1


@pytest.mark.parametrize(
    "ids, token_ids, words",
    [
        (torch.zeros(3, K, dtype=torch.int16), None, "torch.int16; expected int32 or int64"),
        (torch.zeros(2, K, dtype=torch.int32), None, r"expected \[3, k\]"),
        (None, torch.zeros(2, dtype=torch.int64), "one for each of 3 rows"),
        (None, torch.zeros(4, dtype=torch.int32), "one for each of 3 rows"),
        (None, torch.zeros(3, dtype=torch.uint8), "torch.uint8"),
    ],
)
def test_arrays_that_the_gpu_would_read_beyond_are_refused(route, ids, token_ids, words):
    weights = None if ids is None else torch.zeros(ids.shape)
    with pytest.raises((TypeError, ValueError), match=words):
        route.enqueue(0, torch.zeros(3, HIDDEN), ids, weights, token_ids, False)
    assert not route._session(-1).native.calls


def test_a_session_ends_while_another_thread_prepares(route):
    """Forgetting a session walks through what was prepared, and the other thread adds to it as soon as it can."""
    session, rows = route._session(-1), torch.zeros(1, HIDDEN)
    prepares, prepare = (threading.Event(), threading.Event()), session.native.prepare

    def slow(calls):
        prepares[0].set()
        prepares[1].wait()
        return prepare(calls)

    session.native.prepare = slow
    thread = threading.Thread(target=route.enqueue, args=(0, rows, None, None, None, True))
    thread.start()
    prepares[0].wait()

    class Known:
        @property
        def session(self):
            prepares[1].set()
            thread.join(0.2)
            return session

    route._prepared["known"] = Known()
    session.native.ended = True
    route._forget(session)
    thread.join()
    assert len(session.native.calls) == 1
    assert not route._prepared, "the session has ended"


def test_a_timeout_ends_the_attempts_to_open_a_session(route):
    def gone(name):
        raise expertd.UnavailableError("the service is gone")

    route._host = types.SimpleNamespace(model=gone)
    route.retry = expertd.RetryPolicy(max_attempts=1_000_000, max_elapsed=1e6)
    route._ended.add(-1)
    with pytest.raises(expertd.UnavailableError):
        route.forward(0, torch.zeros(1, HIDDEN), 0.2, options())


def test_a_session_with_other_weights_is_not_opened(route):
    assert route.pinned("sampled:01")._session(-1).native.arguments[-1] == "sampled:01"
    route._sessions.clear()
    route.weights = "sampled:02"
    with pytest.raises(expertd.WeightVersionError, match="sampled:02 are expected, sampled:01 are loaded"):
        route._session(-1)
