"""Tiny full models of every family, made with the same sizes and random weights as the golden data."""

import importlib.util
import pathlib

import pytest

torch = pytest.importorskip("torch", reason="the tests of expertd.transformers need torch and transformers")
transformers = pytest.importorskip("transformers", reason="the tests of expertd.transformers need transformers")

import expertd  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parents[3]
_spec = importlib.util.spec_from_file_location("golden_script", ROOT / "scripts" / "golden.py")
golden_script = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(golden_script)

transformers.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def make_checkpoint(family, folder, dtype=torch.float32, **overrides):
    """Writes a random model of `family` as transformers saves it."""
    names, extra, _ = golden_script.FAMILIES[family]
    k = 2 if family == "phimoe" else 4
    sizes = golden_script.sized(names, (64, 12, k, 40))
    config = {**golden_script.TINY, **extra, **sizes, "max_position_embeddings": 128, **overrides}
    if family == "olmoe":
        config["head_dim"] = 16
    write_checkpoint(transformers.AutoConfig.for_model(family, **config), folder, dtype)


def write_checkpoint(config, folder, dtype=torch.float32):
    auto = golden_script.auto_class(config)
    seed = int(torch.randint(1 << 30, (1,)))
    torch.manual_seed(seed)
    model = auto.from_config(config).eval()
    golden_script.randomise(model, seed)
    model.to(dtype).save_pretrained(folder)


@pytest.fixture(scope="session")
def served(tmp_path_factory):
    """`served(family, **overrides)`: a checkpoint's folder and a service that holds it; one service at a time."""
    folders = {}
    running = {}

    def stop():
        for service in running.values():
            service.stop()
        running.clear()

    def of(family, **overrides):
        key = (family, *sorted(overrides.items()))
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(family)
            make_checkpoint(family, folders[key], **overrides)
        if key not in running:
            stop()
            # Limits below what the tests send, so that steps and requests are split.
            running[key] = expertd.serve(folders[key], ranks=2, max_tokens_per_step=64, max_tokens_per_request=40)
        return folders[key], running[key]

    yield of
    stop()


def prompts(batch, length=13):
    """Token ids and mask; with more than one row, each row but the first begins with padding."""
    ids = torch.randint(3, 97, (batch, length))
    mask = torch.ones_like(ids)
    for row in range(batch):
        ids[row, : 3 * row] = 0
        mask[row, : 3 * row] = 0
    return ids, mask


def greedy(model, ids, mask, tokens=32, **options):
    return model.generate(
        input_ids=ids,
        attention_mask=mask,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        **options,
    )


def expert_parameters(model):
    return [name for name, _ in model.named_parameters() if ".experts." in name]
