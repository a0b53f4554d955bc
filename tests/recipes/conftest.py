import shutil
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The folder of an untrained chat model with a token for each character."""
    from tools.learn.chat_model import make_model, make_tokenizer, save
    from tools.learn.recipe import Settings

    folder = tmp_path_factory.mktemp("recipes") / "model"
    tokenizer = make_tokenizer()
    small = Settings(layers=1, width=64, heads=2, intermediate=64, positions=16_384)
    save(make_model(small, len(tokenizer)), tokenizer, folder)
    return folder


@pytest.fixture
def example(tmp_path):
    """Copies an example and makes its rows. Returns the folder."""

    def copy(name):
        folder = tmp_path / name
        shutil.copytree(EXAMPLES / name, folder, ignore=shutil.ignore_patterns("*.jsonl", "runs", "__pycache__"))
        if (folder / "make_data.py").exists():
            subprocess.run([sys.executable, "make_data.py"], cwd=folder, check=True)
        return folder

    return copy
