"""The hostfile, by tables and properties."""

import pytest
from draws import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl.core.errors import UsageError
from asyncrl.launcher.hosts.hostfile import HostLine, parse_hostfile, read_hostfile, select_hosts


def parse(text):
    return parse_hostfile(text, "hosts.txt")


def refused(call, said):
    """Each line of the refusal begins so."""
    with pytest.raises(UsageError) as caught:
        call()
    lines = str(caught.value).split("\n")
    assert len(lines) == len(said) and all(line.startswith(part) for line, part in zip(lines, said, strict=True)), lines


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("# all of them\n\n  b  slots=0   # CPU\r\n\ta#x\n", [("b", 0), ("a", None)]),
        ("10.77.0.2 slots=8\nfe80::1", [("10.77.0.2", 8), ("fe80::1", None)]),
        ("gpu-01.cluster.example_1 slots=08", [("gpu-01.cluster.example_1", 8)]),
    ],
)
def test_a_valid_hostfile_is_read(text, hosts):
    assert parse(text) == [HostLine(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("# only this\n\n", [": names no host"]),
        ("a slots", [":1: 'slots' is not known"]),
        ("a slots=-1", [":1: slots='-1' is no number"]),
        ("a slots=²", [":1: slots='²' is no number"]),
        ("a slots=99999", [":1: slots='99999' is no number"]),
        ("a slots=4 slots=4", [":1: slots is there twice"]),
        ("a slot=4 gpus=2", [":1: 'slot=4' is not known", ":1: 'gpus=2' is not known"]),
        ("a slots = 4", [":1: 'slots' is not known", ":1: '=' is", ":1: '4' is"]),
        ("slots=4", [":1: 'slots=4': the host's name comes first"]),
        ("-oProxyCommand=x", [":1: '-oProxyCommand=x'"]),
        ("me@a", [":1: 'me@a': the user belongs into the ssh configuration"]),
        ("a:22", [":1: 'a:22': the port belongs into the ssh configuration"]),
        ("fe80::1%$(x)", [":1: 'fe80::1%$(x)'"]),
        ("\na\nb\nA slots=1", [":4: A is there already, in line 2"]),
        # All at once, each in its line.
        ("a slots=x\n-b\nc\na", [":1: slots='x'", ":2: '-b' is no", ":4: a is there already, in line 1"]),
    ],
)
def test_an_error_of_a_hostfile_names_its_line(text, problems):
    refused(lambda: parse(text), [f"hosts.txt{problem}" for problem in problems])


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        refused(lambda path=path: read_hostfile(path), [f"hostfile {path}: cannot be read: "])
    (tmp_path / "binary").write_bytes(b"\xff\xfe a")
    with pytest.raises(UsageError, match="is not text"):
        read_hostfile(tmp_path / "binary")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa slots=2\r\n")
    assert read_hostfile(tmp_path / "marked") == [HostLine("a", 2)]


HOSTS = parse("node-1 slots=4\nnode-2\nlogin slots=0")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        (("login", "node-1"), (), ["node-1", "login"]),
        (("NODE-2", "node-2"), (), ["node-2"]),
        ((), ("login",), ["node-1", "node-2"]),
        (("node-1", "node-2"), ("node-1",), ["node-2"]),
    ],
)
def test_hosts_are_selected_in_the_order_of_the_file(include, exclude, left):
    assert [host.name for host in select_hosts(HOSTS, include, exclude)] == left


def test_unknown_names_and_empty_selections_are_refused():
    there = "--include: zzz is not in the hostfile; there are node-1, node-2, login"
    refused(lambda: select_hosts(HOSTS, ("zzz",), ("logn",)), [there, "--exclude: logn"])
    none = "--include and --exclude leave no host of node-1, node-2, login"
    refused(lambda: select_hosts(HOSTS, ("login",), ("login",)), [none])


def test_slots_limit_the_gpus_in_use_and_cannot_exceed_those_of_the_host():
    assert HostLine("a", 2).usable(["3", "5", "7"]) == ("3", "5") == HostLine("a").usable(["3", "5"])
    assert HostLine("a", 0).usable(["3"]) == ()
    refused(lambda: HostLine("a", 4).usable(["0", "1"]), ["a: slots=4 in the hostfile, but 2 GPUs are there"])


@settings(max_examples=examples(50))
@given(st.one_of(st.text(), st.text(alphabet="ab-@:.=#\n\r\t 0123slot")))
def test_any_text_is_read_or_refused(text):
    hosts, refusal = [], None
    try:
        hosts = parse(text)
    except UsageError as error:
        refusal = str(error)
    assert bool(hosts) == (refusal is None)
    assert not any(host.name.startswith("-") or set(host.name) & set("@=#; \n") for host in hosts)
    assert all(line.startswith("hosts.txt:") and line.isprintable() for line in (refusal or "hosts.txt:").split("\n"))
