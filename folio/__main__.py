"""Runs the command line of the family that a checkpoint belongs to.

python -m folio --ckpt DIR_OR_HUB_ID --prompt "Why is the sky blue?"
python -m folio --help
"""

import importlib
import runpy
import sys
from pathlib import Path

from common.command.arguments import Parser, parser
from common.command.cli import mistakes_on_one_line
from common.loading.adapter import open_adapter
from common.loading.files import is_there, read_json
from common.loading.hub import ADAPTER, locate
from common.loading.shape import families_of, published_sizes

ROOT = Path(__file__).parent.parent
DEMO = "llama3"  # answers if no checkpoint is given


def family_of(ckpt: str, revision: str | None = None) -> str:
    """Returns the folder that runs a checkpoint: a directory, a hub id, a config.json, or a size of
    some family's shapes.py. ValueError names what no family computes."""
    families = sorted(file.parent.name for file in ROOT.glob("*/model.py"))
    with_sizes = [family for family in families if (ROOT / family / "shapes.py").exists()]
    for family in with_sizes:
        if ckpt in published_sizes(importlib.import_module(f"{family}.model")):
            return family
    file = Path(ckpt)
    if file.suffix != ".json" or not file.is_file():
        file = locate(ckpt, revision, ["config.json"]) / "config.json"
    if is_there(file.parent / ADAPTER) and not is_there(file):
        raise ValueError(f"{ckpt} is an adapter: give it as --adapter, its base model as --ckpt")
    hf = read_json(file)
    if found := families_of(hf, ROOT):
        if others := found[1:]:
            sys.stderr.write(f"[{found[0]} runs; for another one: python -m {others[0]}.main]\n")
        return found[0]
    kind, known = hf.get("model_type"), ", ".join(families)
    raise ValueError(f"{ckpt}: model_type={kind!r} in config.json is of none of {known}")


@mistakes_on_one_line()
def find() -> str:
    """Returns the family of the checkpoint in the arguments, or of the adapter's base model. Prints
    the help of all families if it is asked for."""
    known = Parser(add_help=False)
    known.add_argument("--ckpt")
    known.add_argument("--adapter")
    known.add_argument("--revision")
    known.add_argument("--help", "-h", action="store_true")
    args = known.parse_known_args()[0]
    if args.help:
        ap = parser("any family")
        ap.prog = "python -m folio"
        ap.print_help()
        sys.exit(0)
    _, ckpt, revision = open_adapter(args.adapter, args.ckpt, args.revision)
    return DEMO if ckpt is None else family_of(ckpt, revision)


def main() -> None:
    runpy.run_module(f"{find()}.main", run_name="__main__")


if __name__ == "__main__":
    main()
