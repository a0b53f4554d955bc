"""Reasons that nobody answers at an address, by a plain connection to it. Leaves nothing behind when it is answered."""

from __future__ import annotations

import re
import socket

CONNECT_S = 4.0
"""Longest wait for a connection."""


def split_address(address: str) -> tuple[str, int]:
    """Host and port of tcp://HOST:PORT or HOST:PORT. Raises ValueError."""
    host, _, port = address.removeprefix("tcp://").rpartition(":")
    if not host or not re.fullmatch("[0-9]{1,5}", port) or not 0 < int(port) < 65536:
        raise ValueError(f"{address!r} is not HOST:PORT")
    return host.strip("[]"), int(port)


def why_unreachable(address: str) -> str:
    """Reason that nobody takes connections there; empty if somebody does. Blocks for at most about CONNECT_S."""
    host, port = split_address(address)
    try:
        with socket.create_connection((host, port), timeout=CONNECT_S):
            return ""
    except socket.gaierror as error:
        return f"the host {host} is not known here ({error.strerror})"
    except UnicodeError:
        return f"{host} can be the name of no host"
    except TimeoutError:
        return f"no connection within {CONNECT_S:g} s: the host is down, or a firewall drops what is sent to that port"
    except OSError as error:
        return f"nobody listens there ({error.strerror})"
