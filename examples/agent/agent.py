"""An agent for sums in words: the model writes an expression, the agent computes it, the model answers.

It knows nothing of asyncrl: it talks to OPENAI_BASE_URL, and prints its score on the last line.
"""

import ast
import json
import operator
import os
import re

from openai import OpenAI

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg}
ASK = "Write an expression for the answer inside <calc></calc>, such as <calc>3 * (4 + 5)</calc>. You get its value."


def compute(node):
    """The value of an expression of whole numbers. Raises an error for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int) and abs(node.value) < 10**9:
        return node.value
    if isinstance(node, ast.UnaryOp):
        return OPERATORS[type(node.op)](compute(node.operand))
    if isinstance(node, ast.BinOp):
        return OPERATORS[type(node.op)](compute(node.left), compute(node.right))
    raise ValueError("only whole numbers, +, - and *")


def value_of(text):
    """The value of the expression in an answer, or what is wrong with it, as text."""
    found = re.search(r"<calc>(.{1,200}?)</calc>", text)
    if found is None:
        return "There is no <calc></calc> in your answer."
    try:
        return str(compute(ast.parse(found[1].strip(), mode="eval").body))
    except (ValueError, SyntaxError, KeyError, RecursionError) as error:
        return f"This cannot be computed: {error}"


with open(os.environ["ASYNCRL_TASK_FILE"]) as file:
    task = json.load(file)
client = OpenAI()
messages = [{"role": "system", "content": ASK}, *task["messages"]]


def ask():
    """The model's next answer, which becomes part of the conversation."""
    text = client.chat.completions.create(model="any", messages=messages).choices[0].message.content or ""
    messages.append({"role": "assistant", "content": text})
    return text


value = value_of(ask())
messages.append({"role": "user", "content": f"{value}\nNow answer with the number alone."})
numbers = re.findall(r"-?\d+", ask())
print(float(numbers[-1:] == [task["row"]["answer"]]))
