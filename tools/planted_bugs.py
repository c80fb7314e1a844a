"""Plants bugs in the model files and kernels, one at a time, and runs tests against each.

    python tools/planted_bugs.py [PLACE ...]

A place is a family, or a kernel such as kernels/softmax. The bugs are in planted_bugs.toml. Each is
planted in a copy of the repository; then the tests of its place must fail. Prints a line for each
bug, and exits with 1 if the tests missed one.
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

from families import SHOWN  # noqa: E402

LEFT_OUT = shutil.ignore_patterns(".git", "__pycache__", ".*_cache", ".hypothesis")
# The tests that must see a kernel's bugs. Those of GPU kernels need JAX 0.11.
ATTENTION = ("test_attention", "test_decode_attention_tpu")
KERNELS = dict.fromkeys(("attention_blocked", "softmax", "visible"), ATTENTION[:1])
KERNELS |= dict.fromkeys(("decode_attention_tpu", "prefill_attention_tpu"), ATTENTION)
KERNELS |= dict.fromkeys(("ragged_dot_tpu", "tile_products"), ("test_ragged_dot",))
KERNELS |= dict.fromkeys(("delta_rule", "delta_rule_tpu"), ("test_delta_rule",))
KERNELS |= dict.fromkeys(("decode_attention_gpu", "ragged_dot_gpu"), ("test_gpu_kernels",))
PLACES = [*SHOWN, *(f"kernels/{name}" for name in KERNELS)]


class Bug(NamedTuple):
    """A bug: `new` replaces `old`, which the file contains once."""

    what: str
    old: str
    new: str


def file_of(place: str) -> str:
    return f"common/{place}.py" if place.startswith("kernels/") else f"{place}/model.py"


def bugs_of(place: str) -> list[Bug]:
    """Returns the bugs of a place and, for a family, those for all families whose code its model
    file contains once. Raises ValueError if the code of one of its own is not there once."""
    text = (ROOT / file_of(place)).read_text(encoding="utf-8")
    bugs = tomllib.loads((ROOT / "tools" / "planted_bugs.toml").read_text(encoding="utf-8"))
    own = [Bug(what, *change) for what, change in bugs.get(place, {}).items()]
    for bug in own:
        if (count := text.count(bug.old)) != 1:
            raise ValueError(f"{file_of(place)} has {bug.old!r} {count} times, not once")
    if place not in SHOWN:
        return own
    shared = (Bug(what, *change) for what, change in bugs["all"].items())
    return [*(bug for bug in shared if text.count(bug.old) == 1), *own]


def tests_of(root: Path, place: str) -> list[str]:
    """Returns the arguments with which pytest runs the tests of a place, among all: by default,
    each test runs with some of the families."""
    if place not in SHOWN:
        return ["--all", *(f"tests/{x}.py" for x in KERNELS[place.removeprefix("kernels/")])]
    files = (f"tests/test_{x}.py" for x in ("definitions", "families", place))
    return ["--all", "-k", place, *(file for file in files if (root / file).exists())]


def is_seen(root: Path, place: str, bug: Bug) -> bool:
    """Plants the bug in the copy of the repository at `root`, and returns whether a test fails."""
    file = root / file_of(place)
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
    options = ["-n0", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = [sys.executable, "-m", "pytest", *options, *tests_of(root, place)]
        return subprocess.run(run, cwd=root, capture_output=True).returncode == 1
    finally:
        file.write_text(text, encoding="utf-8")


def main() -> None:
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("place", nargs="*")
    unseen, chosen = 0, ap.parse_args().place or PLACES
    if unknown := set(chosen) - set(PLACES):
        ap.error(f"no place {unknown}: choose from {', '.join(PLACES)}")
    for place in chosen:
        with tempfile.TemporaryDirectory() as directory:
            root = Path(directory) / "copy"
            shutil.copytree(ROOT, root, ignore=LEFT_OUT)
            for bug in bugs_of(place):
                seen = is_seen(root, place, bug)
                unseen += not seen
                print(f"{'seen' if seen else 'NOT SEEN':8}  {place}: {bug.what}", flush=True)
    sys.exit(1 if unseen else 0)


if __name__ == "__main__":
    main()
