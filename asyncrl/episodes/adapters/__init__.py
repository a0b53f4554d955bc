"""Environments of other packages as ``episode.env``: a module for each, which needs asyncrl's extra of that name."""
