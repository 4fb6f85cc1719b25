"""Coverage-guided fuzzing of `strategies.updates.decode`, by atheris: it refuses bytes, or reads what NumPy reads.

    python -m tests.strategies.fuzz_decode FOLDER -max_total_time=600

FOLDER holds inputs to begin with; the options are those of libFuzzer, which also writes an input that breaks something
to a file. `test_fuzz.py` runs it for some seconds.
"""

import sys

import atheris

with atheris.instrument_imports(include=["strategies.updates"]):
    from strategies.updates import UnusableTensor, decode

from tests.npy_files import require_as_numpy_reads


def one_input(data: bytes) -> None:
    """Decode, and compare with NumPy where that succeeds."""
    try:
        array = decode(data)
    except UnusableTensor:
        return
    require_as_numpy_reads(array, data)


if __name__ == "__main__":
    atheris.Setup(sys.argv, one_input)
    atheris.Fuzz()
