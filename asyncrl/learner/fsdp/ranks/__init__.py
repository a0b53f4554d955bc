"""The ranks of the learner together: rendezvous, commands, exchanges of bytes, and the watch for hangs."""
