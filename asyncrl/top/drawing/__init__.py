"""Styled text, bars and tables. Pure."""
