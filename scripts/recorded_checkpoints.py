"""Folders of the recorded checkpoints in tests/fixtures."""

import functools
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent


@functools.cache
def folder(name: str) -> pathlib.Path:
    """The folder of a checkpoint, such as golden/mixtral, written first if it is drawn from a seed. Needs cargo."""
    line = ["cargo", "run", "--quiet", "--package", "expertd-test-fixtures", "--", name]
    return pathlib.Path(subprocess.run(line, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip())
