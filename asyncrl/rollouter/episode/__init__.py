"""Episodes as the rollouter plays them: conversations and their tokens, sessions, metrics."""
