"""Calls in CUDA graphs that fail: which exceptions a client raises. Neither torch nor a GPU: both are stand-ins.

`test_cuda_sessions.py` has the tests on a GPU, and the crate of sessions those of the words that streams wait for.
"""

import importlib
import sys
import threading
import types

import pytest

import expertd


class Native:
    """The native half of a session: words, and the counts that belong to them."""

    def __init__(self):
        self.ended = self.kept = False
        self.failures = self.raised = self.released = self.raised_released = 0

    def replay(self):
        """A graph's replay; the client's thread releases its streams if the session has ended."""
        self.released += self.ended

    def call(self):
        """A call that no graph captures."""
        if self.ended:
            raise expertd.UnavailableError("the session has ended")

    def check(self):
        if self.ended:
            self.raised, self.raised_released = self.failures, self.released
            raise expertd.UnavailableError("the session has ended")
        if self.failures > self.raised:
            self.raised = self.failures
            raise expertd.DeadlineError("a call failed")

    def verify(self):
        if self.ended or self.failures:
            raise expertd.UnavailableError("the session has ended")

    def check_ended(self):
        counted, raised = (self.failures, self.released), (self.raised, self.raised_released)
        self.raised, self.raised_released = counted
        if counted > raised:
            raise expertd.UnavailableError("the session has ended")

    def is_kept(self):
        return self.kept

    def has_ended(self):
        return self.ended


@pytest.fixture
def route(monkeypatch):
    """A route with stand-ins for torch and for its session, and the devices that it waited for."""
    waited = []
    torch = types.ModuleType("torch")
    torch.Tensor, torch._C = object, types.SimpleNamespace()
    for name in ("bfloat16", "float16", "float32", "int32", "int64"):
        setattr(torch, name, name)
    torch.cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=waited.append, is_current_stream_capturing=lambda: False)
    dlpack = types.ModuleType("torch.utils.dlpack")
    dlpack.from_dlpack = None
    for name, module in (("torch", torch), ("torch.utils", types.ModuleType("torch.utils")), ("torch.utils.dlpack", dlpack)):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("expertd._cuda", "expertd._cuda_session"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module("expertd._cuda")
    for name in ("expertd._cuda", "expertd._cuda_session"):
        # So that other tests import these modules with torch.
        del sys.modules[name]
    route = module.CudaRoute("unix:/nowhere.sock", None, "raise")
    route.waited = waited
    opened = []
    monkeypatch.setattr(route, "_open", lambda device, retry, seconds: opened.append(session(device)) or opened[-1])
    return route


def session(device):
    return types.SimpleNamespace(device=device, native=Native())


def test_a_failure_is_raised_once_and_an_end_each_time(route):
    native = route._session(1).native
    route.check()
    native.failures += 1
    with pytest.raises(expertd.DeadlineError):
        route.check()
    route.check()
    native.ended = True
    for _ in range(3):
        with pytest.raises(expertd.UnavailableError):
            route.check()
    with pytest.raises(expertd.UnavailableError):
        route.synchronize()
    assert route.waited == [1]


def test_engines_see_a_failure_in_every_thread_and_after_another_call_raised_it(route):
    native = route._session(0).native
    route.verify()
    native.failures += 1
    with pytest.raises(expertd.DeadlineError):
        route.check()
    raised = []

    def look():
        try:
            route.verify()
        except expertd.UnavailableError as error:
            raised.append(error)

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(raised) == 4


def test_replays_of_an_old_sessions_graph_fail_although_there_is_another_session(route):
    old = route._session(0)
    old.native.kept = old.native.ended = True
    old.native.replay()
    with pytest.raises(expertd.UnavailableError):
        route.check()
    route._forget(old)
    new = route._session(0)
    assert new is not old
    # Graphs that were captured anew.
    route.check()
    for _ in range(2):
        old.native.replay()
        with pytest.raises(expertd.UnavailableError):
            route.synchronize()
        route.check()
    with pytest.raises(expertd.UnavailableError):
        route.verify()


def test_a_failed_replay_is_found_although_another_threads_call_found_the_end_first(route):
    old = route._session(0)
    old.native.kept = old.native.ended = True
    old.native.replay()
    with pytest.raises(expertd.UnavailableError):
        old.native.call()
    route._forget(old)
    with pytest.raises(expertd.UnavailableError):
        route.check()


def test_a_replay_that_the_service_failed_before_the_session_ended_is_found(route):
    old = route._session(0)
    old.native.kept = True
    old.native.failures += 1
    old.native.ended = True
    with pytest.raises(expertd.UnavailableError):
        old.native.call()
    route._forget(old)
    with pytest.raises(expertd.UnavailableError):
        route.check()
    route.check()


def test_an_engine_opens_no_session_after_the_one_of_its_graphs(route):
    """Opening is tried for ten minutes while no service answers, and the graphs would fail all the same."""
    route.reopens = False
    eager = route._session(0)
    eager.native.ended = True
    route._forget(eager)
    old = route._session(0)
    assert old is not eager
    old.native.kept = old.native.ended = True
    route._forget(old)
    for _ in range(3):
        with pytest.raises(expertd.UnavailableError):
            route._session(0)


def test_a_session_without_graphs_is_forgotten_when_it_ends(route):
    old = route._session(0)
    old.native.ended = True
    route._forget(old)
    assert route._replaced == []
    route._session(0)
    route.check()
    route.verify()


def test_the_setting_has_two_values():
    with pytest.raises(ValueError, match="on_graph_failure is 'nan'"):
        expertd.Client("127.0.0.1:1", on_graph_failure="nan")
