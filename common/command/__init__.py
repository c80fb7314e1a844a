"""The command line that every family has: `arguments`, `environment`, `converse` and `dryrun` are
parts of `cli`. Imports everything; only a family's `main.py` imports it. To start, read `cli`."""

import sys

try:
    import jax  # noqa: F401
except ValueError as error:  # about a JAX_ variable, which JAX reads on import
    sys.stderr.write(f"error: {error} (an environment variable)\n")
    sys.exit(2)
