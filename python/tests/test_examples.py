"""The examples run as printed. Those that need torch, transformers or matplotlib are skipped where these are absent."""

import importlib.util
import pathlib
import subprocess
import sys

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[2] / "examples" / "python"


@pytest.mark.parametrize(
    "arguments, needs, printed",
    [
        (["many_calls.py"], [], "400 calls"),
        (["many_calls.py", "--session"], [], "400 calls"),
        (["routing.py"], ["matplotlib"], "wrote routing.png"),
        (["generate.py"], ["torch", "transformers"], "the same"),
    ],
)
def test_example(tmp_path, arguments, needs, printed):
    for module in needs:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{arguments[0]} needs {module}, which is not installed")
    command = [sys.executable, str(EXAMPLES / arguments[0]), *arguments[1:]]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert printed in ran.stdout and "DIFFERENT" not in ran.stdout
    if "matplotlib" in needs:
        assert (tmp_path / "routing.png").read_bytes().startswith(b"\x89PNG")
