"""What loading checks and refuses, what it costs, and what generation survives."""

import os
import pathlib
import re
import signal
import subprocess
import sys
import textwrap
import threading

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

from conftest_hf import greedy, make_checkpoint, prompts  # noqa: E402

import expertd  # noqa: E402
from expertd.transformers import remote_experts  # noqa: E402

load = transformers.AutoModelForCausalLM.from_pretrained


def test_outside_of_the_block_models_are_local(served):
    folder, service = served("mixtral")
    with remote_experts(service.address):
        pass
    assert any(".experts." in name for name, _ in load(folder).named_parameters())


def test_another_model_is_refused(served, tmp_path):
    folder, service = served("mixtral")
    cases = {
        "olmoe": (dict(), "family mixtral, and this process's of olmoe"),
        "mixtral": (dict(num_hidden_layers=3), r"MoE layers \[0, 1\]"),
    }
    for family, (overrides, words) in cases.items():
        other = tmp_path / family
        make_checkpoint(family, other, **overrides)
        with remote_experts(service.address), pytest.raises(expertd.ModelMismatchError, match=words):
            load(other)
    for overrides, words in (
        (dict(hidden_size=128), "hidden size 64"),
        (dict(num_local_experts=8), "num_experts 8"),
        (dict(intermediate_size=48), "expert_width 48"),
        (dict(num_experts_per_tok=3), "top_k 3"),
        (dict(), "fingerprint"),
    ):
        other = tmp_path / re.sub(r"\W", "_", words)
        make_checkpoint("mixtral", other, **overrides)
        with remote_experts(service.address), pytest.raises(expertd.ModelMismatchError, match=words):
            load(other)
    with remote_experts(service.address, check_weights=False):
        load(other)


def test_models_without_experts_and_other_versions_are_refused(served, tmp_path, monkeypatch):
    _, service = served("mixtral")
    config = transformers.AutoConfig.for_model(
        "llama", vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with remote_experts(service.address), pytest.raises(expertd.UnsupportedError, match="no MoE block"):
        load(tmp_path)
    for version in ("5.16.2", "5.24.0", "4.57.1"):
        monkeypatch.setattr(transformers, "__version__", version)
        with pytest.raises(expertd.UnsupportedError, match=re.escape(version)), remote_experts(service.address):
            pass
    if not torch.cuda.is_available():
        with pytest.raises(expertd.UnsupportedError, match="GPU"), remote_experts("x", session="cuda"):
            pass


@pytest.mark.parametrize("mode", ["experts", "block"])
def test_training_is_refused(served, mode):
    folder, service = served("mixtral")
    with remote_experts(service.address, mode=mode):
        model = load(folder)
    ids, _ = prompts(1)
    loss = model(input_ids=ids, labels=ids).loss
    with pytest.raises(expertd.UnsupportedError, match="no gradients"):
        loss.backward()
    model.train()
    with pytest.raises(expertd.UnsupportedError, match="training mode"):
        model(input_ids=ids)


def test_static_caches_device_maps_and_copies(served):
    import copy

    folder, service = served("qwen3_moe")
    local = load(folder)
    with remote_experts(service.address):
        remote = load(folder, device_map={"": "cpu"})
    ids, mask = prompts(4)
    expected = greedy(local, ids, mask)
    assert torch.equal(greedy(remote, ids, mask, cache_implementation="static"), expected)
    assert torch.equal(greedy(copy.deepcopy(remote), ids, mask), expected)


def test_a_compiled_model_calls_the_service(served):
    folder, service = served("mixtral")
    with remote_experts(service.address):
        model = load(folder)
    ids, mask = prompts(2)
    # "aot_eager" traces and runs the fake implementation without generating code.
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        expected = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
        found = compiled(input_ids=ids, attention_mask=mask, use_cache=False).logits
    assert (found - expected)[mask.bool()].abs().max() <= 1e-5


def children(pid):
    lists = pathlib.Path(f"/proc/{pid}/task").glob("*/children")
    return sorted(int(child) for path in lists for child in path.read_text().split())


@pytest.mark.parametrize("session", [None, "host"], ids=["grpc", "host"])
@pytest.mark.parametrize("mode", ["experts", "block"])
def test_generation_goes_on_when_a_rank_is_killed(served, mode, session):
    folder, service = served("qwen3_moe")
    with remote_experts(service.session_address if session else service.address, mode=mode, session=session):
        model = load(folder)
    ids, mask = prompts(4)
    expected = greedy(model, ids, mask)
    steps = 0

    def kill(module, arguments):
        nonlocal steps
        steps += 1
        if steps == 20:
            os.kill(children(service.process.pid)[-1], signal.SIGKILL)

    before = service.client().model().generation
    hook = model.model.layers[0].mlp.register_forward_pre_hook(kill)
    found = greedy(model, ids, mask)
    hook.remove()
    assert steps > 20 and service.client().model().generation > before
    assert torch.equal(found, expected)


@pytest.mark.parametrize("session", [None, "host"], ids=["grpc", "host"])
def test_loading_takes_no_memory_for_experts(tmp_path, session):
    """The process's largest resident size grows by less than a tenth of the experts' size."""
    synth = [expertd.command(), "synth", "--family", "qwen3_moe", "--dtype", "bf16", "--out", str(tmp_path / "big")]
    sizes = {"--hidden": 512, "--width": 768, "--experts": 64, "--layers": 3, "--top-k": 4}
    arguments = [str(value) for pair in sizes.items() for value in pair]
    subprocess.run([*synth, *arguments], check=True, capture_output=True)
    experts = 3 * 64 * 3 * 512 * 768 * 2
    assert experts > 415e6
    program = textwrap.dedent("""
        import resource, sys, torch, transformers, expertd
        from expertd.transformers import remote_experts
        torch.set_num_threads(1)

        def resident():
            return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10

        folder, address, tiny, tiny_address, session = sys.argv[1:]
        session = session or None
        # Load a model first, so that the memory of the libraries is not counted.
        with remote_experts(tiny_address, session=session):
            transformers.AutoModelForCausalLM.from_pretrained(tiny)
        before, before_peak = resident(), peak()
        with remote_experts(address, session=session):
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        after, after_peak = resident(), peak()
        with torch.no_grad():
            assert torch.isfinite(model(input_ids=torch.tensor([[1, 2, 3]])).logits).all()
        held = sum(p.numel() * p.element_size() for p in model.parameters())
        print(after - before, max(after_peak - max(before_peak, before), 0), held)
    """)
    make_checkpoint("qwen3_moe", tmp_path / "tiny")
    with (
        expertd.serve(tmp_path / "big", ranks=1) as service,
        expertd.serve(tmp_path / "tiny", ranks=1) as tiny,
    ):
        addresses = [s.session_address if session else s.address for s in (service, tiny)]
        arguments = [str(tmp_path / "big"), addresses[0], str(tmp_path / "tiny"), addresses[1], session or ""]
        ran = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    growth, peak_growth, held = map(int, ran.stdout.split()[-3:])
    print(f"experts {experts / 1e6:.0f} MB; resident +{growth / 1e6:.1f} MB, peak +{peak_growth / 1e6:.1f} MB, weights {held / 1e6:.1f} MB")
    assert growth < experts / 10 and peak_growth < experts / 10


def test_threads_that_load_other_models_are_left_alone(served):
    folder, service = served("mixtral")
    found = []
    with remote_experts(service.address):
        thread = threading.Thread(target=lambda: found.append(load(folder)))
        thread.start()
        thread.join()
    assert any(".experts." in name for name, _ in found[0].named_parameters())
