"""Everything that determines the quickstart's model and data, and the hash that names them.

``LOGNORMAL`` is the task with responses of lognormal length, for the benchmark: 33 to 300 tokens.

Invariant: two sets of assets with the same hash were made by the same code, settings and library versions.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from tools import asset_cache
from tools.quickstart.task import CHARACTERS, DOT


@dataclass(frozen=True)
class Settings(asset_cache.ModelSettings):
    """Settings of data, model and warm-up."""

    digits: tuple[int, int] = (3, 4)
    """Least and most digits of a number."""
    heldout: int = 512
    train: int = 8192
    probes: int = 256
    """Training problems on which the warm-up looks for a signal."""

    dots: float = 0.0
    """Median number of dots behind a demonstrated solution; 0 has none."""
    dots_sigma: float = 1.0
    """Sigma of their lognormal distribution."""
    most_dots: int = 256

    kv_heads: int = 1
    """vLLM's CPU attention computes the queries of one of them together, in about the time of a single query."""
    intermediate: int = 640
    positions: int = 128

    forget: float = 0.5
    """Chance that the teacher of the warm-up forgets a carry: RL cannot win what the demonstrations already give."""
    signal: float = 0.25
    """The warm-up ends once this share of sampled responses is right: enough for most groups of 8 to hold both."""
    check_every: int = 20
    """Steps between two looks at the probes."""
    check_below: float = 0.2
    """Loss above which no response comes out right, so that a look would be wasted."""
    max_steps: int = 800
    """Steps after which the warm-up fails."""

    @property
    def characters(self) -> str:
        """Characters that are a token each."""
        return CHARACTERS + DOT if self.dots else CHARACTERS


SETTINGS = Settings()
LOGNORMAL = Settings(dots=24.0, positions=320)


def content_hash(settings: Settings) -> str:
    """Names the assets of ``settings``, as the code of this folder makes them."""
    return asset_cache.content_hash(asdict(settings), Path(__file__).parent)
