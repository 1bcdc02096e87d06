"""Random numbers of tests, from a seed that pytest prints and EXPERTD_TEST_SEED sets."""

import os
import secrets
import zlib
from collections import Counter

import numpy as np

SEED = int(os.environ.get("EXPERTD_TEST_SEED") or secrets.randbits(32))
_calls = Counter()


def rng():
    """A generator for the running test: another one with each call, the same ones in each run with the same seed."""
    test = os.environ.get("PYTEST_CURRENT_TEST", "").split(" ")[0]
    _calls[test] += 1
    return np.random.default_rng([SEED, zlib.crc32(test.encode()), _calls[test]])
