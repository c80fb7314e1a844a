"""Writes docs/differences.md, which says of each model file which definitions are not llama3's.
differences.toml says in words how they differ. Also renumbers the links to lines of code in the
READMEs and in docs/reading.md.

    python tools/differences.py
"""

import argparse
import ast
import re
import sys
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from families import SHOWN  # noqa: E402

PAGE, READING = ROOT / "docs" / "differences.md", ROOT / "docs" / "reading.md"
BASE = "llama3"
LOADING = ("Config", "config_from_hf", "weight_layout", "init_state", "checkpoint_table")
NEARER = {"kimi_k2": "deepseek_r1"}  # families that are compared with another one than llama3
FAMILIES = [family for family in SHOWN if family != BASE]

HEAD = """# From llama3 to the others

All model files have the same order and the same names. Definitions of the same task have the same
body, so what differs is the architecture. These lists say which definitions are new, changed or
gone. They leave out what loads a checkpoint: `Config`, `config_from_hf`, `weight_layout`,
`init_state`, `checkpoint_table` and constants. Kimi K2 is compared with DeepSeek R1. All changes:

```sh
git diff --no-index llama3/model.py qwen3/model.py
```
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


def fields(source: str) -> dict[str, str]:
    """Returns the fields of a class, each with its type and default."""
    found = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.AnnAssign)]
    return {ast.unparse(node.target): ast.unparse(node) for node in found}


def change_of_fields(before: str, after: str) -> str:
    """Returns which fields a class gains and loses, or else changes; "" if it is no class."""
    if not re.search("^class ", after, re.MULTILINE):
        return ""
    old, new = fields(before), fields(after)
    changes = dict(
        gains=[name for name in new if name not in old],
        loses=[name for name in old if name not in new],
    )
    if not any(changes.values()):
        changes = dict(changes=[name for name in new if new[name] != old[name]])
    said = {verb: ", ".join(f"`{name}`" for name in names) for verb, names in changes.items()}
    return "; ".join(f"{verb} {names}" for verb, names in said.items() if names)


def notes() -> dict[str, dict[str, str]]:
    """Returns what differences.toml says of each family's definitions, and of those in "all"."""
    text = (ROOT / "tools" / "differences.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def section(family: str, said: dict[str, dict[str, str]]) -> str:
    """Removes the notes that it uses from `said[family]`. Raises ValueError if one is missing."""
    nearest = NEARER.get(family, BASE)
    base, own, notes_left = definitions(nearest), definitions(family), said.setdefault(family, {})
    own = {name: own[name] for name in own if name not in LOADING and not name.isupper()}
    same = [name for name in own if name in base and own[name].source == base[name].source]
    shown = [name for name in base if name not in LOADING and not name.isupper()]
    gone = [link(nearest, name, base[name]) for name in shown if name not in own]

    def line(name: str) -> str:
        change = change_of_fields(base[name].source, own[name].source) if name in base else ""
        note = notes_left.pop(name, "") or ("" if change else said["all"].get(name, ""))
        if not change and not note:
            raise ValueError(f"differences.toml says nothing of {name} of {family}")
        return f"* {link(family, name, own[name])} {'. '.join(filter(None, [change, note]))}."

    parts = [f"## {nearest} → {family}"]
    new = [line(name) for name in own if name not in base]
    parts.append("\n".join(["**New**:\n", *new]) if new else "**New**: nothing.")
    changed = [line(name) for name in own if name in base and name not in same]
    parts.append("\n".join(["**Changed**:\n", *changed]))
    parts.append(f"**Gone**: {', '.join(gone)}." if gone else "**Gone**: nothing.")
    return "\n\n".join(parts)


def page(families: list[str]) -> str:
    said = notes()
    sections = [section(family, said) for family in families]
    if unused := {family: list(said[family]) for family in families if said[family]}:
        raise ValueError(f"differences.toml speaks of definitions that do not differ: {unused}")
    return "\n\n".join([HEAD.strip(), *sections]) + "\n"


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
