"""The files of a run's folder, as tests read them."""

import json

from tools.chaos.audit import covered


def json_lines(path):
    """The objects of a file, one a line; an empty list if there is no such file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run_dir, kind):
    """The lines of metrics.jsonl of this kind."""
    return [line for line in json_lines(run_dir / "metrics.jsonl") if line["kind"] == kind]


def groups(run_dir):
    """Every trained group in samples/, step by step."""
    return [group for path in sorted((run_dir / "samples").glob("step_*")) for group in json_lines(path)]


def assert_spans_cover(trajectory):
    """I3: each token of its one sequence is sampled from one version, not older than that of the token before it."""
    [sequence] = trajectory["sequences"]
    assert all(role == "sampled" for *_, role in sequence["spans"])
    assert covered(sequence), sequence
