"""Writes docs/differences.md, which compares each model file with llama3's, definition by
definition. Also renumbers the links to lines of code in the READMEs and in docs/reading.md.

    python tools/differences.py
"""

import argparse
import ast
import difflib
import re
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import SHOWN  # noqa: E402

PAGE, READING = ROOT / "docs" / "differences.md", ROOT / "docs" / "reading.md"
BASE = "llama3"
NEARER = {"kimi_k2": "deepseek_r1"}  # families that are compared with another one than llama3
FAMILIES = [family for family in SHOWN if family != BASE]

HEAD = """# From llama3 to the others

All model files have the same order and the same names. Definitions with the same name and the same
task have the same body, so the difference between two files is the difference between two
architectures. `python tools/differences.py` makes this page from the files, and a test fails when
it is out of date. For each family it lists the definitions that are identical to llama3's
(for Kimi K2, those of DeepSeek R1), then the new ones, with links, and the changes to the rest.
"""


class Definition(NamedTuple):
    line: int
    source: str  # with its decorators


def definitions(family: str) -> dict[str, Definition]:
    """Returns the functions, classes and constants of a model file, in order."""
    text = (ROOT / family / "model.py").read_text(encoding="utf-8")
    lines, found = text.splitlines(), {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name, first = node.name, min([node.lineno, *(d.lineno for d in node.decorator_list)])
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            name, first = ast.unparse(target), node.lineno
        else:
            continue
        found[name] = Definition(first, "\n".join(lines[first - 1 : node.end_lineno]) + "\n")
    return found


def link(family: str, name: str, definition: Definition) -> str:
    return f"[`{name}`](../{family}/model.py#L{definition.line})"


def change(before: str, after: str) -> str:
    """Returns a unified diff with two lines around each change, without headers."""
    lines = list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2))
    return "\n".join("" if line.startswith("@@") else line for line in lines[3:])


def section(family: str) -> str:
    nearest = NEARER.get(family, BASE)
    base, own = definitions(nearest), definitions(family)
    same = [name for name in own if name in base and own[name].source == base[name].source]
    changed = [name for name in own if name in base and name not in same]
    parts = [f"## {nearest} → {family}"]
    parts.append("**The same**: " + ", ".join(f"`{name}`" for name in same) + ".")
    new = ", ".join(link(family, name, own[name]) for name in own if name not in base)
    parts.append(f"**New**: {new}." if new else "**New**: nothing.")
    gone = ", ".join(link(nearest, name, base[name]) for name in base if name not in own)
    parts.append(f"**Not needed**: {gone}." if gone else "**Not needed**: nothing.")
    parts.append("**Changed**:")
    for name in changed:
        diff = change(base[name].source, own[name].source)
        parts.append(f"{link(family, name, own[name])}\n\n```diff\n{diff}\n```")
    return "\n\n".join(parts)


def page(families: list[str]) -> str:
    return "\n\n".join([HEAD.strip(), *map(section, families)]) + "\n"


def renumbered(readme: Path) -> str:
    """Returns the README's text with every [words](file.py#L7 "code") linked to the one line that
    contains this code. Raises ValueError if not exactly one line does."""

    def relink(match: re.Match[str]) -> str:
        file, code = match.group(1), match.group(3)
        text = (readme.parent / file).read_text(encoding="utf-8")
        at = [i for i, line in enumerate(text.splitlines(), 1) if code and code in line]
        if len(at) != 1:
            raise ValueError(f"{readme}: {code!r} is in {len(at)} lines of {file}, not in one")
        return f'({file}#L{at[0]} "{code}")'

    text = readme.read_text(encoding="utf-8")
    return re.sub(r'\(([^()#:\s]+)#L(\d+)(?: "([^"]*)")?\)', relink, text)


def reranged(page: Path) -> str:
    """Returns the page's text with every [`name`](file.py#L1-L2) linked to the lines of that
    function or class. Raises ValueError if the file does not define it exactly once."""

    def relink(match: re.Match[str]) -> str:
        name, file = match.groups()
        tree = ast.parse((page.parent / file).read_text(encoding="utf-8"))
        kinds = ast.FunctionDef | ast.ClassDef
        found = [node for node in tree.body if isinstance(node, kinds) and node.name == name]
        if len(found) != 1:
            raise ValueError(f"{page}: {file} has {len(found)} definitions of {name}, not one")
        return f"[`{name}`]({file}#L{found[0].lineno}-L{found[0].end_lineno})"

    return re.sub(r"\[`(\w+)`\]\(([^()#\s]+)#L\d+-L\d+\)", relink, page.read_text(encoding="utf-8"))


if __name__ == "__main__":
    argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0]).parse_args()
    PAGE.write_text(page(FAMILIES), encoding="utf-8")
    for family in SHOWN:
        readme = ROOT / family / "README.md"
        readme.write_text(renumbered(readme), encoding="utf-8")
    READING.write_text(reranged(READING), encoding="utf-8")
