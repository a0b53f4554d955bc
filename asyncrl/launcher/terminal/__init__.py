"""The launcher's terminal: progress, notices, summary, and the user's signals."""
