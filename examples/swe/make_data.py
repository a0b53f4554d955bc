"""Writes train.jsonl and heldout.jsonl: small repositories with one bug each, and the tests that find it.

Real repositories work in the same way: a row has the columns prompt, files and tests, texts by path.
"""

import json
import random

# Each: module, source, bugs (a right part of the source and a wrong one), statements that must hold.
MODULES = (
    ("clamp", "def clamp(value, low, high):\n    return max(low, min(value, high))\n",
     [("min(value, high)", "min(value, low)"), ("max(low", "max(high"), ("max(low, min", "min(low, max")],
     ["clamp(5, 0, 3) == 3", "clamp(-1, 0, 3) == 0", "clamp(2, 0, 3) == 2"]),
    ("words", "def count_words(text):\n    counts = {}\n    for word in text.lower().split():\n"
     "        counts[word] = counts.get(word, 0) + 1\n    return counts\n",
     [(".lower()", ""), ("get(word, 0) + 1", "get(word, 1) + 1"), (".split()", ".split(',')")],
     ["count_words('A a b') == {'a': 2, 'b': 1}", "count_words('') == {}"]),
    ("dates", "def is_leap(year):\n    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)\n",
     [("!= 0 or", "!= 0 and"), ("% 400", "% 300"), ("year % 4 == 0 and", "year % 4 == 0 or")],
     ["is_leap(2024)", "is_leap(2000)", "not is_leap(1900)", "not is_leap(2023)"]),
    ("search", "def position(items, wanted):\n    low, high = 0, len(items)\n    while low < high:\n"
     "        middle = (low + high) // 2\n        if items[middle] < wanted:\n            low = middle + 1\n"
     "        else:\n            high = middle\n    return low\n",
     [("low = middle + 1", "low = middle + 2"), ("items[middle] < wanted", "items[middle] <= wanted"),
      ("return low", "return low + 1"), ("high = 0, len(items)", "high = 0, len(items) - 1")],
     ["position([1, 3, 5], 3) == 1", "position([1, 3, 5], 6) == 3", "position([], 1) == 0",
      "position([1, 2, 3, 4], 2) == 1"]),
    ("text", "def is_palindrome(text):\n    letters = [letter for letter in text.lower() if letter.isalpha()]\n"
     "    return letters == letters[::-1]\n",
     [("[::-1]", "[::1]"), (".lower()", ""), (" if letter.isalpha()", "")],
     ["is_palindrome('Never odd or even')", "not is_palindrome('asyncrl')", "is_palindrome('No, it is opposition.')"]),
    ("money", "def change(amount, coins=(50, 20, 10, 5, 2, 1)):\n    given = []\n    for coin in coins:\n"
     "        while amount >= coin:\n            given.append(coin)\n            amount -= coin\n    return given\n",
     [("amount >= coin", "amount > coin"), ("amount -= coin", "amount -= 1"),
      ("given.append(coin)", "given.append(amount)")],
     ["change(70) == [50, 20]", "change(8) == [5, 2, 1]", "change(0) == []"]),
)  # fmt: skip
PROMPT = "The tests in {tests} fail. Find the bug in {path} and repair it. Run the tests, and stop when they pass."


def make_rows():
    """A row for each bug."""
    for name, source, bugs, statements in MODULES:
        cases = "".join(f"        self.assertTrue({statement})\n" for statement in statements)
        test = (
            f"import unittest\n\nfrom {name} import *\n\n\nclass Test(unittest.TestCase):\n    def test(self):\n{cases}"
        )
        path, tests = f"{name}.py", f"tests/test_{name}.py"
        for right, wrong in bugs:
            broken = source.replace(right, wrong)
            assert broken != source
            prompt = PROMPT.format(path=path, tests=tests)
            yield {"prompt": prompt, "files": {path: broken}, "tests": {tests: test}, "repaired": source}


rows = list(make_rows())
random.Random(0).shuffle(rows)
for file, part in (("train.jsonl", rows[3:]), ("heldout.jsonl", rows[:3])):
    with open(file, "w") as opened:
        opened.writelines(json.dumps(row) + "\n" for row in part)
