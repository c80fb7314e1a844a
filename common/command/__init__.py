"""The command line that every family has: `arguments`, `environment`, `converse` and `dryrun` are
parts of `cli`. Imports everything; only a family's `main.py` imports it. To start, read `cli`."""

import os
import signal
import sys

sys.stderr = sys.stderr or open(os.devnull, "w")  # noqa: SIM115 (if it is closed)
# Ctrl-C ends a command that is still importing, without a traceback.
tell, before = sys.excepthook, signal.signal(signal.SIGINT, signal.SIG_DFL)
sys.excepthook = lambda kind, *rest: kind is KeyboardInterrupt or tell(kind, *rest)
try:
    import jax  # noqa: F401
except ValueError as error:  # about a JAX_ variable, which JAX reads on import
    sys.stderr.write(f"error: {error} (an environment variable)\n")
    sys.exit(2)
signal.signal(signal.SIGINT, before)
