"""The fixture `served` of these tests; without torch and transformers they are skipped."""

import importlib.util

if importlib.util.find_spec("torch") and importlib.util.find_spec("transformers"):
    from conftest_hf import served  # noqa: F401
