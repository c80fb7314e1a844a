"""Plants bugs in the model files, one at a time, and runs the default tests against each.

    python tools/planted_bugs.py [family ...]

The bugs are in planted_bugs.toml. Each is planted in a copy of the repository; then the tests of
its family must fail. Prints a line for each bug, and exits with 1 if the tests missed one.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import FAMILIES, SHOWN  # noqa: E402

LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis")


class Bug(NamedTuple):
    """A bug: `new` replaces `old`, which the model file contains once."""

    what: str
    old: str
    new: str


def bugs_of(family: str) -> list[Bug]:
    """Returns the family's own bugs, and those for all families whose code its model file contains
    once. Raises ValueError if it does not contain the code of one of its own once."""
    text = (ROOT / family / "model.py").read_text(encoding="utf-8")
    bugs = tomllib.loads((ROOT / "tools" / "planted_bugs.toml").read_text(encoding="utf-8"))
    own = [Bug(what, *change) for what, change in bugs.get(family, {}).items()]
    for bug in own:
        if (count := text.count(bug.old)) != 1:
            raise ValueError(f"{family}/model.py has {bug.old!r} {count} times, not once")
    shared = (Bug(what, *change) for what, change in bugs["all"].items())
    return [*(bug for bug in shared if text.count(bug.old) == 1), *own]


def is_seen(root: Path, family: str, bug: Bug) -> bool:
    """Plants the bug in the copy of the repository at `root`, and returns whether a test fails."""
    file = root / family / "model.py"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    own = f"tests/test_{family}.py"
    tests = ["tests/test_families.py", *([own] if (root / own).exists() else [])]
    options = ["-n0", "-x", "-q", "-k", f"{family} or test_{family}", "-p", "no:cacheprovider"]
    try:
        run = [sys.executable, "-m", "pytest", *options, *tests]
        return subprocess.run(run, cwd=root, capture_output=True).returncode == 1
    finally:
        file.write_text(text, encoding="utf-8")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("family", nargs="*")
    unseen, chosen = 0, ap.parse_args().family or SHOWN
    if unknown := set(chosen) - set(FAMILIES):
        ap.error(f"no family {unknown}: choose from {', '.join(FAMILIES)}")
    for family in chosen:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "copy"
            shutil.copytree(ROOT, root, ignore=LEFT_OUT)
            for bug in bugs_of(family):
                seen = is_seen(root, family, bug)
                unseen += not seen
                print(f"{'seen' if seen else 'NOT SEEN':8}  {family}: {bug.what}", flush=True)
    sys.exit(1 if unseen else 0)


if __name__ == "__main__":
    main()
