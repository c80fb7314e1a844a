"""The command line that every family has: its options (`arguments`), the order in which things are
checked, loaded and run (`cli`), replies and conversations on standard output (`converse`), dry runs
printed (`dryrun`), and what the command finds around it: streams and JAX's settings
(`environment`), compiled programs that are kept (`programs`), memory (`memory`).

Imports everything; nothing imports it but a family's `main.py`. To start, read `run` in `cli.py`.
"""

import sys

try:
    import jax  # noqa: F401
except ValueError as error:  # of a JAX_ variable, which JAX reads while it is imported
    sys.stderr.write(f"error: {error} (a variable of the environment)\n")
    sys.exit(2)
