"""From text to tokens and back: tokenizer, stops, chat, supervised conversations. Needs neither an engine nor torch."""
