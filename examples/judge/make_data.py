"""Writes train.jsonl: a subject and a reader in each prompt."""

import itertools
import json

SUBJECTS = (
    "why the sky is blue", "how a lock works", "why bread rises", "what a prime number is", "how a vaccine works",
    "why we have seasons", "how a bicycle stays upright", "what inflation is", "how a battery works", "why leaves fall",
    "how sound travels", "what a database index is", "why ice floats", "how tides arise", "what a hash function is",
)  # fmt: skip
READERS = ("a child of six", "a farmer", "a lawyer", "a chemist", "a new programmer", "someone who learns English")
with open("train.jsonl", "w") as file:
    for subject, reader in itertools.product(SUBJECTS, READERS):
        file.write(json.dumps({"prompt": f"Explain {subject} to {reader}, in exactly three sentences."}) + "\n")
