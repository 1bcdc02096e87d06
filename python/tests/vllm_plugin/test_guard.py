"""Results of vLLM's steps are checked before they are given out. vLLM's classes are stand-ins with its names (0.26.0 and 0.32.0)."""

import queue
import sys
import threading
import types

import pytest

import expertd
from expertd.vllm import _guard

NAMES = [(module, owner, method) for module, owner, methods in _guard._OUTPUTS for method in methods]


class Session:
    """What a check sees of a session: the service, or the client's own thread, counts a failure before a stream goes on."""

    def __init__(self):
        self.failures = 0

    def verify(self):
        if self.failures:
            raise expertd.UnavailableError("the session has ended")


class Step:
    """One replay. Its words fail the step's tokens at some time before the GPU's work ends, if they do."""

    def __init__(self, session, fails=False):
        self.session, self.fails = session, fails
        self.tokens = None

    def wait(self):
        """Waits for the event behind the step, as vLLM does."""
        self.session.failures += self.fails
        self.tokens = [151935] if self.fails else [7]
        return self.tokens


def results(waits):
    """A class with all three methods that hand over a step."""

    class Results:
        def __init__(self, step=None):
            self.step = step

        def get_output(self):
            return self.step.wait()

        def execute_model(self, step):
            return step.wait() if waits else type(self)(step)

        def sample_tokens(self, step):
            return self.execute_model(step)

    return Results


@pytest.fixture
def vllm(monkeypatch):
    """Modules with vLLM's names. `Worker` schedules synchronously."""
    modules = {}
    for module, owner, _ in NAMES:
        found = modules.setdefault(module, types.ModuleType(module))
        if not hasattr(found, owner):
            setattr(found, owner, results(waits=owner == "Worker"))
    for name in list(modules):
        while name:
            monkeypatch.setitem(sys.modules, name, modules.get(name) or types.ModuleType(name))
            name = name.rpartition(".")[0]
    return lambda module, owner: getattr(modules[module], owner)


def hand_over(owner, method, step):
    results = owner(step)
    return results.get_output() if method == "get_output" else getattr(results, method)(step)


@pytest.mark.parametrize("module, owner, method", NAMES)
def test_a_failed_step_gives_out_no_token_nor_do_later_ones(vllm, module, owner, method):
    session = Session()
    assert _guard.guard_outputs(session.verify)
    kind = vllm(module, owner)
    assert hand_over(kind, method, Step(session)) == [7]
    failed = Step(session, fails=True)
    with pytest.raises(expertd.UnavailableError):
        hand_over(kind, method, failed)
    assert failed.tokens is not None, "the check came before the wait"
    for _ in range(3):
        with pytest.raises(expertd.UnavailableError):
            hand_over(kind, method, Step(session))


def test_with_asynchronous_scheduling_the_thread_of_outputs_sees_a_failure(vllm):
    """Step 2 is launched before step 1's tokens are asked for, in another thread, and each of them may be the one that failed."""
    for failing in (1, 2, 3):
        session = Session()
        assert _guard.guard_outputs(lambda: session.verify())  # noqa: B023
        kind = vllm("vllm.v1.worker.gpu.async_utils", "AsyncOutput")
        launched, given, raised = queue.Queue(), [], []

        def output_loop(kind=kind, launched=launched, given=given, raised=raised):
            while (step := launched.get()) is not None:
                try:
                    given.append(kind(step).get_output())
                except expertd.UnavailableError as error:
                    raised.append(error)

        thread = threading.Thread(target=output_loop)
        thread.start()
        for number in (1, 2, 3, 4):
            launched.put(Step(session, fails=number == failing))
        launched.put(None)
        thread.join()
        assert given == [[7]] * (failing - 1)
        assert len(raised) == 5 - failing
        for module, owner, method in NAMES:
            unguard(vllm(module, owner), method)


def unguard(owner, method):
    original = getattr(owner, method).__wrapped__
    setattr(owner, method, original)


def test_the_calls_exception_replaces_the_one_that_its_nan_causes(vllm):
    session = Session()
    kind = vllm("vllm.v1.worker.gpu_worker", "Worker")

    def execute_model(self, step):
        step.wait()
        raise RuntimeError("probabilities contain nan")

    kind.execute_model = execute_model
    assert _guard.guard_outputs(session.verify)
    with pytest.raises(RuntimeError, match="contain nan"):
        kind().execute_model(Step(session))
    with pytest.raises(expertd.UnavailableError):
        kind().execute_model(Step(session, fails=True))


def test_methods_are_replaced_once(vllm):
    calls = []
    assert _guard.guard_outputs(lambda: calls.append(1)) and _guard.guard_outputs(lambda: calls.append(2))
    hand_over(vllm("vllm.v1.worker.gpu_worker", "Worker"), "sample_tokens", Step(Session()))
    assert calls in ([1], [1, 1]), "sample_tokens may call execute_model"


@pytest.mark.parametrize("module, owner, method", NAMES)
def test_a_vllm_without_one_of_the_methods_is_left_alone(vllm, monkeypatch, caplog, module, owner, method):
    monkeypatch.delattr(vllm(module, owner), method)
    before = {name: vars(vllm(*name[:2])).get(name[2]) for name in NAMES}
    assert not _guard.guard_outputs(Session().verify)
    assert {name: vars(vllm(*name[:2])).get(name[2]) for name in NAMES} == before
    assert "the process ends" in caplog.text
