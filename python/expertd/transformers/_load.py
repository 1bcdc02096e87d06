"""Replaces MoE blocks, or their experts, while `from_pretrained` builds a model.

transformers builds a model on the meta device, lets quantisers replace modules, and then calls `_get_dtype_plan` before it
maps devices and reads weights. That call is the seam: at that point modules have their final names and kinds, nothing is
allocated, and tensors of a checkpoint that no module wants are not read.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
import transformers
from transformers.generation.utils import GenerationMixin
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.modeling_utils import PreTrainedModel

from .._client import Credentials, check_session
from .._content import check_content
from .._engines.settings import Settings
from .._errors import UnsupportedError
from .._torch import Remote
from ._check import check_model
from ._modules import RemoteBlock, RemoteExperts, RemoteLlama4

if TYPE_CHECKING:
    from .._types import Address, Session

_VERSIONS = ((5, 17), (5, 23))
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.[^.]+$")
_NOT_TEXT = re.compile(r"vision|visual|audio|(?:^|\.)(?:mtp|talker)")
Mode = Literal["experts", "block"]
_NAME = "expertd"

# The settings of the running `with` block; None outside of a block, and in other threads.
_wanted: contextvars.ContextVar[tuple[Remote, Mode, bool] | None] = contextvars.ContextVar("expertd", default=None)


@contextlib.contextmanager
def remote_experts(
    address: Address,
    mode: Mode = "experts",
    session: Session | None = None,
    *,
    credentials: Credentials | None = None,
    check_weights: bool = True,
    follow_weights: bool = False,
) -> Iterator[None]:
    """Models that `from_pretrained` loads inside this block have their experts at `address`.

    Arguments:
        address: address of the service that holds the same checkpoint: `HOST:PORT` or `unix:/PATH`. A list of addresses, or
            one name with several, stands for services that hold its layers together. With `session="host"`, the
            session socket of a service on this host (`expertd serve --session-listen unix:/PATH`).
        mode: "experts": the model's own gate chooses and weighs experts, shared experts are computed locally, and the
            service applies the choice. "block": the service computes the whole MoE block, gate and shared experts
            included, and their weights are not read, either.
        session: None: rows travel over gRPC. "host": through memory that the service shares. "network": by one-sided writes over NIXL. "cuda":
            rows stay on the model's GPU, and calls are work of its streams.
        credentials: certificates and token, as of `expertd.Client`.
        check_weights: compare the fingerprint of the service's weights with that of the checkpoint where the checkpoint is a local
            folder. Dimensions, layers and family are always compared.
        follow_weights: go on when the service moves to other weights. By default calls raise `WeightVersionError` then.

    Raises:
        UnsupportedError: this version of transformers was not tested, or the model cannot work with remote experts.
        ModelMismatchError: the service holds a different model.
        ConnectError: nothing answers at the address.
    """
    check_session(session)
    if mode not in ("experts", "block"):
        raise ValueError(f'mode is {mode!r}; expected "experts" or "block"')
    _refuse_other_versions()
    _install()
    token = _wanted.set((Remote(address, credentials, session, follows=follow_weights), mode, check_weights))
    try:
        yield
    finally:
        _wanted.reset(token)


def _refuse_other_versions() -> None:
    found = transformers.__version__
    match = re.match(r"(\d+)\.(\d+)", found)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if not _VERSIONS[0] <= version <= _VERSIONS[1]:
        first, last = (".".join(map(str, v)) for v in _VERSIONS)
        raise UnsupportedError(
            f"transformers {found} is installed; remote experts were tested with {first} to {last}: "
            f"pip install 'transformers>={first},<{_VERSIONS[1][0]}.{_VERSIONS[1][1] + 1}'"
        )


@functools.cache
def _install() -> None:
    """Hooks into the loading of every model; without a `with` block around it the hook does nothing."""
    original = PreTrainedModel._get_dtype_plan

    @functools.wraps(original)
    def with_remote_experts(model: PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
        wanted = _wanted.get() or _named(model)
        if wanted is not None:
            _replace(model, *wanted)
        return original(model, *args, **kwargs)

    PreTrainedModel._get_dtype_plan = with_remote_experts
    GenerationMixin.generate = _checked(GenerationMixin.generate)
    GenerationMixin.generate_batch = _checked(GenerationMixin.generate_batch)


def register() -> None:
    """Makes `experts_implementation="expertd"` a name of transformers for remote experts at `EXPERTD_ADDRESS`."""
    ALL_EXPERTS_FUNCTIONS.register(_NAME, _local_experts)
    _install()


def _local_experts(experts: torch.nn.Module, *_args: Any, **_kwargs: Any) -> Any:
    raise UnsupportedError(
        f'{type(experts).__name__} holds its weights in this process; pass experts_implementation="expertd" to from_pretrained, which '
        "leaves them out"
    )


def _named(model: PreTrainedModel) -> tuple[Remote, Mode, bool] | None:
    """What `experts_implementation="expertd"` asks for, or None."""
    if model.config._experts_implementation != _NAME:
        return None
    settings = Settings.from_environment(engine="transformers")
    if settings is None:
        raise UnsupportedError(
            'experts_implementation="expertd" needs the address of a service: set EXPERTD_ADDRESS, or load the model inside of '
            "expertd.transformers.remote_experts"
        )
    if settings.service_gate:
        raise UnsupportedError(
            'EXPERTD_GATE=service is for vLLM and SGLang; unset it, or load the model inside of remote_experts(…, mode="block"), which '
            "leaves gates and shared experts to the service"
        )
    _refuse_other_versions()
    remote = Remote(settings.address, settings.credentials, settings.session, follows=settings.follow_weights)
    return remote, "experts", settings.check_weights


def _checked(original: Any) -> Any:
    """Calls on a GPU fail after they were made: the last steps of `generate` and `generate_batch` are checked before they return."""

    @functools.wraps(original)
    def generate(model: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(model, *args, **kwargs)
        remote = getattr(model, "_expertd_remote", None)
        if remote is not None:
            remote.synchronize()
        return output

    return generate


def _replace(model: PreTrainedModel, remote: Remote, mode: Mode, check_weights: bool) -> None:
    blocks = {name: block for name, block in model.named_modules() if _is_block(name, block)}
    if not blocks:
        raise UnsupportedError(
            f"{type(model).__name__} has no MoE block with a module `experts`; load it outside of remote_experts"
        )
    layers = {name: int(_LAYER.search(name)[1]) for name in blocks}  # type: ignore[index]
    check_model(model, layers, remote.model)
    folder = model.config.name_or_path
    if check_weights and folder and os.path.isdir(folder):
        check_content(folder, remote.model)
    for name, block in blocks.items():
        _put(model, name, block, remote, mode, remote.layer(layers[name]))
    _ignore_missing(model, list(blocks), mode)
    model._expertd_remote = remote


def _is_block(name: str, module: torch.nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    return isinstance(experts, torch.nn.Module) and bool(_LAYER.search(name)) and not _NOT_TEXT.search(name)


def _put(
    model: PreTrainedModel, name: str, block: torch.nn.Module, remote: Remote, mode: Mode, served: Any
) -> None:
    parent = model.get_submodule(name.rpartition(".")[0])
    attribute = name.rpartition(".")[2]
    kind = type(block).__name__
    pair = kind.startswith(("GptOss", "Llama4"))
    if mode == "block":
        setattr(parent, attribute, RemoteBlock(remote, served, pair))
    elif kind.startswith("Llama4"):
        setattr(parent, attribute, RemoteLlama4(remote, served, block))
    else:
        block.experts = RemoteExperts(remote, served)
        if not list(block.parameters(recurse=False)):
            # Some models initialise the experts' weights together with their block; here these weights do not exist.
            block._is_hf_initialized = True


def _ignore_missing(model: PreTrainedModel, blocks: list[str], mode: Mode) -> None:
    """Keeps transformers from reporting the tensors that are not read, under the names of checkpoints and of modules."""
    owners = {re.escape(name.rpartition(".")[2]) for name in blocks} | {"mlp", "block_sparse_moe", "feed_forward", "ffn"}
    inside = r"\." if mode == "block" else r"\.experts\."
    pattern = rf"layers\.(?:{'|'.join(sorted({str(_LAYER.search(n)[1]) for n in blocks}))})\.(?:{'|'.join(sorted(owners))}){inside}"  # type: ignore[index]
    model._keys_to_ignore_on_load_unexpected = {*(model._keys_to_ignore_on_load_unexpected or ()), pattern}
