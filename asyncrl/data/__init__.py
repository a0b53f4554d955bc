"""Files of a data set, their rows, and the order in which prompts are drawn from them."""
