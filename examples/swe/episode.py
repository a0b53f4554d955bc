"""The model gets a repository whose tests fail, edits its files by tools, and is rewarded if they pass.

All that the model writes runs in a sandbox: without network, without this machine's files, with limits.
"""

import json
import secrets

from asyncrl import sandbox

# Runs the tests, and prints the word of its standard input only if all have passed. It reads that word before it
# imports anything of the model's, so code that ends the process, or prints, does not count as a pass. Code that
# searches the memory of its process for the word is not stopped: read the samples of a run.
CHECK = """
import sys, unittest
word = sys.stdin.read()
result = unittest.TextTestRunner().run(unittest.defaultTestLoader.discover("tests"))
print(word if result.wasSuccessful() and result.testsRun else "failed")
"""


def tool(name, description, **parameters):
    """A tool as OpenAI's chat completions have it; all parameters are text."""
    properties = {key: {"type": "string", "description": value} for key, value in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = [
    tool("read_file", "The content of a file.", path="relative path"),
    tool("write_file", "Replace the content of a file, or make one.", path="relative path", content="all of it"),
    tool("run_tests", "Run the tests and return their output."),
]


class Repository:
    """Files by path. Tests can be read, and are always those of the row."""

    def __init__(self, row):
        self.files, self.tests = dict(row["files"]), dict(row["tests"])

    async def test(self):
        """Whether all tests pass, and their output."""
        word = secrets.token_hex(16)
        files = self.files | self.tests | {"check.py": CHECK}
        result = await sandbox.run_async(["python3", "check.py"], files, timeout=10.0, stdin=word)
        output = "the tests took too long" if result.timed_out else result.stderr[-2000:]
        return result.ok and result.stdout.endswith(f"{word}\n"), output

    async def call(self, name, path="", content=""):
        """The result of a tool, as text."""
        if name == "run_tests":
            return (await self.test())[1]
        if name == "read_file":
            return (self.files | self.tests).get(path, f"there is no file {path!r}; there are {self.names()}")
        if name == "write_file":
            # Raises ValueError for a path out of the repository.
            sandbox.SandboxRequest(argv=["true"], files={path: content})
            self.files[path] = content
            return "written"
        return f"there is no tool {name!r}"

    def names(self):
        """The paths of all files."""
        return ", ".join(sorted(self.files | self.tests))


async def play(task, client, *, turns):
    """One attempt of at most ``turns`` answers."""
    repository = Repository(task.row)
    messages = list(task.messages)
    refused = 0
    for _ in range(turns):
        reply = await client.chat(messages, tools=TOOLS)
        messages.append(reply.message)
        if not reply.tool_calls:
            break
        for call in reply.tool_calls:
            try:
                answer = await repository.call(call.name, **json.loads(call.arguments))
            except (ValueError, TypeError) as error:
                answer, refused = f"this call cannot be made: {error}", refused + 1
            messages.append({"role": "tool", "tool_call_id": call.id, "content": answer})
    passed, _ = await repository.test()
    return {"reward": float(passed), "refused_calls": refused}
