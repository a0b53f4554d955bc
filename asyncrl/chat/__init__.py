"""How the messages of a conversation become tokens, and tokens messages. Needs neither an engine nor torch."""
