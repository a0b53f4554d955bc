"""Writes train.jsonl: sums in words."""

import json
import random


def make_row(source):
    """A question and its answer."""
    boxes, each, broken, price = (source.randint(3, 99) for _ in range(4))
    broken %= boxes * each
    question = f"{boxes} boxes hold {each} cups each. {broken} cups are broken. The others are sold for {price} each."
    return {"prompt": f"{question} How much money is that?", "answer": str((boxes * each - broken) * price)}


source = random.Random(0)
with open("train.jsonl", "w") as file:
    file.writelines(json.dumps(make_row(source)) + "\n" for _ in range(4096))
