"""The notebook of the page on the library."""

import json
import subprocess
import sys

import pytest
from engine import ENVIRONMENT

from tools.notebook import NOTEBOOK, PAGE, ROOT, notebook


def test_the_notebook_is_that_of_the_page():
    assert NOTEBOOK.read_text("utf-8") == notebook(), "run python tools/notebook.py"
    code = [x for x in json.loads(notebook())["cells"] if x["cell_type"] == "code"]
    assert len(code) == PAGE.read_text("utf-8").count("```python") + 1


@pytest.mark.full
def test_the_cells_run_one_after_the_other_where_there_are_several_devices(tmp_path):
    cells = [x for x in json.loads(notebook())["cells"] if x["cell_type"] == "code"]
    code = "\n".join("".join(x["source"]) for x in cells)
    told = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"]
    flags = ENVIRONMENT["XLA_FLAGS"] + " --xla_force_host_platform_device_count=2"
    kept = dict(cwd=tmp_path, capture_output=True, text=True)
    done = subprocess.run(told, env=ENVIRONMENT | dict(XLA_FLAGS=flags), **kept)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("after layer") > 1 and done.stdout.count("without layer") > 1
