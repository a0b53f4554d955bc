"""What is going on: logging, metrics, state-time ledgers, recorded snapshots, and who watches them."""
