"""Environments of other packages as ``episode.env``: one module a package, each an extra of asyncrl of its name."""
