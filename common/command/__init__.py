"""The command line that every family has. `arguments` declares its options and checks whether they
go together. `cli` opens a model, loads and runs it. `converse` makes requests of prompts, prints
replies and holds conversations, and `dryrun` prints dry runs. `environment` makes JAX's settings.

Imports everything; only a family's `main.py` imports it. To start, read `run` in `cli.py`.
"""

import sys

try:
    import jax  # noqa: F401
except ValueError as error:  # about a JAX_ variable, which JAX reads on import
    sys.stderr.write(f"error: {error} (an environment variable)\n")
    sys.exit(2)
