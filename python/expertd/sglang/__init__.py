"""SGLang with remote experts: a general plugin of SGLang.

    EXPERTD_ADDRESS=unix:/run/session.sock EXPERTD_SESSION=cuda python -m sglang.launch_server --model-path path/to/checkpoint

SGLang loads the plugin in each of its processes, through the entry point group `sglang.srt.plugins`. Without `EXPERTD_ADDRESS` the plugin
does nothing. `docs/sglang.md` has the details.
"""

from __future__ import annotations

from .._engines.settings import Settings
from .._errors import UnsupportedError

__all__ = ["register"]

# Version and what it was tried on.
TRIED = {
    "0.5.17": "one H200, CUDA sessions in SGLang's CUDA graphs",
    "0.5.23": "its modules on a processor, no model was run",
}


def register() -> None:
    """Makes the routed experts of the models that this process loads remote, if `EXPERTD_ADDRESS` is set.

    Ends the process if this SGLang cannot have remote experts, or if a variable is wrong: SGLang logs other exceptions of a plugin and goes on with its own experts.
    """
    try:
        settings = Settings.from_environment(engine="SGLang")
    except ValueError as error:
        raise SystemExit(f"expertd: {error}") from error
    if settings is None:
        return
    import sglang

    from .._engines.versions import refuse_other_versions
    from ._install import install

    try:
        refuse_other_versions("SGLang", sglang.__version__, TRIED, settings.any_version)
        install()
    except UnsupportedError as error:
        raise SystemExit(f"expertd: {error}") from error
