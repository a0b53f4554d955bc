"""Conversion between the messages of a conversation and tokens. Needs neither an engine nor torch."""
