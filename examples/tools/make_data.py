"""Writes train.jsonl and heldout.jsonl: questions about a warehouse that only the tools can answer."""

import json
import random

ARTICLES = ("bolt", "nut", "hinge", "lamp", "rope", "saw", "glue", "brush", "tile", "hook")


def make_row(source):
    """A row: the question, its answer, and the warehouse."""
    stock = {
        name: {"number": source.randint(2, 60), "price": source.randint(3, 99)} for name in source.sample(ARTICLES, 5)
    }
    first, second = source.sample(sorted(stock), 2)
    if source.random() < 0.5:
        question, of = f"What is the total value of all pieces of {first}?", [first]
    else:
        question, of = f"What is the total value of all pieces of {first} and {second} together?", [first, second]
    answer = sum(stock[name]["number"] * stock[name]["price"] for name in of)
    return {"prompt": question, "answer": str(answer), "stock": stock}


source = random.Random(0)
for file, size in (("train.jsonl", 4096), ("heldout.jsonl", 128)):
    with open(file, "w") as opened:
        opened.writelines(json.dumps(make_row(source)) + "\n" for _ in range(size))
