"""The dataloader: the order of prompts and the only gate of admission."""
