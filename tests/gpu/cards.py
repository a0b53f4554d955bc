"""GPUs as the driver describes them."""

from asyncrl.messages.monitor import Gpu


def card(total, used=0):
    """A GPU with so much memory (bytes)."""
    return Gpu(index=0, utilisation=None, memory_bytes=used, memory_total_bytes=total)
