"""The example notebook, executed as a person would."""

import json
import re
import shutil
from pathlib import Path

import nbclient
import nbformat
import pytest
from run_files import metrics

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"


def test_the_notebook_is_committed_without_outputs():
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    assert len(cells) > 4 and not any(cell["outputs"] or cell["execution_count"] for cell in cells)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_notebook_trains_a_model_and_shows_it(tmp_path, monkeypatch):
    (tmp_path / "examples").mkdir()
    shutil.copy(NOTEBOOK, tmp_path / "examples")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    notebook = nbformat.read(tmp_path / "examples" / NOTEBOOK.name, as_version=4)
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    nbclient.NotebookClient(notebook, timeout=400, resources=resources).execute()
    shown = [str(output) for cell in notebook.cells for output in cell.get("outputs", [])]
    rewards = [line["reward/mean"] for line in metrics(tmp_path / "runs" / "sevens", "train")]
    assert len(rewards) == 5 and rewards[-1] > rewards[0] + 0.1, rewards
    assert any(re.search("steps +5 of 5", each) for each in shown) and any("reward/mean" in each for each in shown)
    assert any("eval/data: 32 prompts, up to 4 samples each" in output for output in shown)
    # The function's errors would name its cell.
    [module] = (tmp_path / "runs" / "sevens" / "inputs").glob("*/asyncrl_functions.py")
    assert "'share': 'Cell In[2]:4'" in module.read_text()
