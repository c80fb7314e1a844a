"""Commands that measure the library: `python -m benchmarks.NAME --help`."""

import importlib
from types import ModuleType


def model_file(family: str) -> ModuleType:
    """The model file of a family. ValueError if there is no such folder."""
    try:
        return importlib.import_module(f"{family}.model")
    except ModuleNotFoundError as error:
        if error.name not in (family, f"{family}.model"):
            raise  # the file needs a package
        raise ValueError(f"{family!r} is no folder that holds a model.py") from None
