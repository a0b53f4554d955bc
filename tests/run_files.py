"""The files of a run's folder, as tests read them."""

import json


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
    """I3: each token of its one sequence has one version, which is not older than that of the token before it."""
    [sequence] = trajectory["sequences"]
    ends = [0, *(end for _, _, end, _ in sequence["spans"])]
    assert [start for _, start, _, _ in sequence["spans"]] == ends[:-1]
    assert ends[-1] == len(sequence["tokens"])
    versions = [version for version, _, _, _ in sequence["spans"]]
    assert versions == sorted(versions)
