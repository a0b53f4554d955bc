"""What is going on: logging, metrics, state-time ledgers."""
