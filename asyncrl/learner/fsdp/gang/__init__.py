"""The ranks together: commands, exchanges of bytes, and the watch for hangs."""
