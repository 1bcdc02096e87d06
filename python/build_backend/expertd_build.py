"""Builds the wheel: maturin for the extension module, cargo for the `expertd` command that goes with it.

maturin builds one crate, and the command is another one of the same workspace. This backend builds the command first and
leaves it where maturin picks up files for the wheel's scripts.

EXPERTD_BINARY    a finished `expertd` to put into the wheel, for example one with GPU ranks
EXPERTD_FEATURES  features to build the command with, for example "cuda" (needs nvcc)
"""

import os
import pathlib
import shutil
import subprocess
import sys

import maturin
from maturin import get_requires_for_build_editable, get_requires_for_build_wheel

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_wheel",
]

PACKAGE = pathlib.Path(__file__).resolve().parent.parent
WORKSPACE = PACKAGE.parent
SCRIPTS = PACKAGE / "wheel-data" / "scripts"
DOCUMENTS = PACKAGE / "wheel-data" / "data" / "share" / "doc" / "expertd"


def prepare_metadata_for_build_wheel(metadata_directory, config_settings=None):
    # maturin needs the folder, even if only metadata are requested.
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    return maturin.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    place_command()
    return maturin.build_wheel(wheel_directory, config_settings, metadata_directory)


def build_editable(wheel_directory, config_settings=None, metadata_directory=None):
    place_command()
    return maturin.build_editable(wheel_directory, config_settings, metadata_directory)


def build_sdist(sdist_directory, config_settings=None):
    raise SystemExit(
        "expertd: there is no source distribution, because the wheel is built from the whole repository; "
        "run `pip install ./python` or `pip wheel ./python` in a checkout"
    )


def place_command():
    """Puts a stripped copy of the command into the wheel's scripts."""
    source = os.environ.get("EXPERTD_BINARY") or cargo_build()
    if not pathlib.Path(source).is_file():
        raise SystemExit(f"expertd: EXPERTD_BINARY is {source!r}, which is no file; expected a finished `expertd`")
    SCRIPTS.mkdir(parents=True, exist_ok=True)
    target = SCRIPTS / "expertd"
    shutil.copyfile(source, target)
    target.chmod(0o755)
    if strip := shutil.which("strip"):
        subprocess.run([strip, "--strip-debug", target], check=True)
    place_licences()


def place_licences():
    """Puts the licences of what the wheel contains where pip installs data: share/doc/expertd of the environment."""
    DOCUMENTS.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(WORKSPACE / "LICENSE", DOCUMENTS / "LICENSE")
    command = [sys.executable, WORKSPACE / "scripts/third_party.py", DOCUMENTS / "THIRD-PARTY.md"]
    command += ["--package", "expertd", "expertd-python"]
    if features := os.environ.get("EXPERTD_FEATURES"):
        command += ["--features", features]
    subprocess.run(command, check=True)


def cargo_build():
    """Builds the command in release mode and returns its path."""
    command = ["cargo", "build", "--release", "--locked", "--package", "expertd", "--bin", "expertd"]
    if features := os.environ.get("EXPERTD_FEATURES"):
        command += ["--features", features]
    try:
        subprocess.run(command, cwd=WORKSPACE, check=True)
    except FileNotFoundError as error:
        raise SystemExit("expertd: cargo is not on PATH; install Rust (https://rustup.rs) and try again") from error
    target = pathlib.Path(os.environ.get("CARGO_TARGET_DIR") or WORKSPACE / "target")
    return (WORKSPACE / target) / "release" / "expertd"
