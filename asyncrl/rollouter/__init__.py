"""The rollouter: turns leased prompts into scored prompt groups with the engines of one node."""
