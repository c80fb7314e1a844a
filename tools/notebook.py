"""Makes docs/library.ipynb, the notebook of docs/library.md: its code in cells, between its words.

python tools/notebook.py
"""

import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, NOTEBOOK = ROOT / "docs" / "library.md", ROOT / "docs" / "library.ipynb"
FIRST = """# In Colab, remove the signs "#" below, and name the address of the repository:
# !git clone REPOSITORY folio
# %cd folio
# %pip install -q -e . optax"""


def cell(kind: str, text: str, number: int) -> dict[str, Any]:
    lines = text.strip().splitlines(keepends=True)
    made = dict(cell_type=kind, id=f"cell-{number}", metadata={}, source=lines)
    return made | (dict(execution_count=None, outputs=[]) if kind == "code" else {})


def notebook() -> str:
    """Returns the notebook as JSON, in version 4.5 of its format."""
    title, *parts = re.split(r"```python\n(.*?)```\n", PAGE.read_text("utf-8"), flags=re.DOTALL)
    kinds = [("markdown", title), ("code", FIRST)]
    kinds += [("markdown" if i % 2 else "code", part) for i, part in enumerate(parts)]
    cells = [cell(kind, text, i) for i, (kind, text) in enumerate(kinds)]
    language = dict(language_info=dict(name="python"))
    whole = dict(cells=cells, metadata=language, nbformat=4, nbformat_minor=5)
    return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(notebook(), encoding="utf-8")
