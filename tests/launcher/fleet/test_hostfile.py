"""The hostfile, by tables and properties."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asyncrl.errors import UsageError
from asyncrl.launcher.fleet.hostfile import HostLine, parse_hostfile, read_hostfile, select_hosts


def parse(text):
    return parse_hostfile(text, "hosts.txt")


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("a slots=4", [("a", 4)]),
        ("a slots=4\nb\n", [("a", 4), ("b", None)]),
        ("# all of them\n\n  b  slots=0   # CPU\r\n\ta#x\n", [("b", 0), ("a", None)]),
        ("10.77.0.2 slots=8\nfe80::1", [("10.77.0.2", 8), ("fe80::1", None)]),
        ("gpu-01.cluster.example_1 slots=08", [("gpu-01.cluster.example_1", 8)]),
    ],
)
def test_what_is_right_is_read(text, hosts):
    assert parse(text) == [HostLine(*host) for host in hosts]


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("", ["hosts.txt: names no host"]),
        ("# only this\n\n", ["hosts.txt: names no host"]),
        ("a slots", ["hosts.txt:1: 'slots' is not known"]),
        ("a slots=", ["hosts.txt:1: slots='' is no number"]),
        ("a slots=-1", ["hosts.txt:1: slots='-1' is no number"]),
        ("a slots=4.0", ["hosts.txt:1: slots='4.0' is no number"]),
        ("a slots=²", ["hosts.txt:1: slots='²' is no number"]),
        ("a slots=99999", ["hosts.txt:1: slots='99999' is no number"]),
        ("a slots=4 slots=4", ["hosts.txt:1: slots is there twice"]),
        ("a max_slots=4", ["hosts.txt:1: 'max_slots=4' is not known"]),
        ("a slot=4 gpus=2", ["hosts.txt:1: 'slot=4' is not known", "hosts.txt:1: 'gpus=2' is not known"]),
        ("a slots = 4", ["hosts.txt:1: 'slots' is not known", "hosts.txt:1: '=' is", "hosts.txt:1: '4' is"]),
        ("slots=4", ["hosts.txt:1: 'slots=4': the host's name comes first"]),
        ("-oProxyCommand=x", ["hosts.txt:1: '-oProxyCommand=x'"]),
        ("-v", ["hosts.txt:1: '-v' is no host name"]),
        ("me@a", ["hosts.txt:1: 'me@a': the user belongs into the ssh configuration"]),
        ("a:22", ["hosts.txt:1: 'a:22': the port belongs into the ssh configuration"]),
        ("fe80::1%$(x)", ["hosts.txt:1: 'fe80::1%$(x)'"]),
        ("a;b", ["hosts.txt:1: 'a;b' is no host name"]),
        ("\na\nb\nA slots=1", ["hosts.txt:4: A is there already, in line 2"]),
        # All at once, each in its line.
        (
            "a slots=x\n-b\nc\na",
            ["hosts.txt:1: slots='x'", "hosts.txt:2: '-b' is no", "hosts.txt:4: a is there already, in line 1"],
        ),
    ],
)
def test_what_is_wrong_is_named_with_its_line(text, problems):
    with pytest.raises(UsageError) as caught:
        parse(text)
    said = str(caught.value).split("\n")
    assert len(said) == len(problems)
    for line, problem in zip(said, problems, strict=True):
        assert line.startswith(problem)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    for path, reason in ((tmp_path / "none", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(UsageError, match=f"hostfile {path}: cannot be read: {reason}"):
            read_hostfile(path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe a")
    with pytest.raises(UsageError, match="is not text"):
        read_hostfile(tmp_path / "binary")
    (tmp_path / "marked").write_bytes(b"\xef\xbb\xbfa slots=2\r\n")
    assert read_hostfile(tmp_path / "marked") == [HostLine("a", 2)]


HOSTS = parse("node-1 slots=4\nnode-2\nlogin slots=0")


@pytest.mark.parametrize(
    ("include", "exclude", "left"),
    [
        ((), (), ["node-1", "node-2", "login"]),
        (("login", "node-1"), (), ["node-1", "login"]),
        (("NODE-2", "node-2"), (), ["node-2"]),
        ((), ("login",), ["node-1", "node-2"]),
        (("node-1", "node-2"), ("node-1",), ["node-2"]),
    ],
)
def test_hosts_are_selected_in_the_order_of_the_file(include, exclude, left):
    assert [host.name for host in select_hosts(HOSTS, include, exclude)] == left


@pytest.mark.parametrize(
    ("include", "exclude", "said"),
    [
        (("nod-1",), (), ["--include: nod-1 is not in the hostfile; did you mean node-1?"]),
        (
            ("zzz",),
            ("logn",),
            ["--include: zzz is not in the hostfile; there are node-1, node-2, login", "--exclude: logn"],
        ),
        (("login",), ("login",), ["--include and --exclude leave no host of node-1, node-2, login"]),
    ],
)
def test_unknown_names_and_empty_selections_are_refused(include, exclude, said):
    with pytest.raises(UsageError) as caught:
        select_hosts(HOSTS, include, exclude)
    lines = str(caught.value).split("\n")
    assert len(lines) == len(said) and all(line.startswith(part) for line, part in zip(lines, said, strict=True))


def test_slots_limit_what_is_used_and_may_not_promise_more():
    assert HostLine("a", 2).usable(["3", "5", "7"]) == ("3", "5")
    assert HostLine("a").usable(["3", "5"]) == ("3", "5")
    assert HostLine("a", 0).usable(["3"]) == ()
    with pytest.raises(UsageError, match="a: slots=4 in the hostfile, but 2 GPUs are there"):
        HostLine("a", 4).usable(["0", "1"])


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


names = st.from_regex(r"[a-z0-9]([a-z0-9.-]{0,8}[a-z0-9])?", fullmatch=True)
blank = st.sampled_from(["", " ", "\t", "  "])
noise = st.lists(st.sampled_from(["", "# a slots=1", "   ", "\t# b"]), max_size=2)


@given(
    st.lists(st.builds(HostLine, names, st.none() | st.integers(0, 9999)), min_size=1, unique_by=lambda h: h.name),
    st.data(),
)
def test_what_is_written_is_read_again(hosts, data):
    lines = []
    for host in hosts:
        lines += data.draw(noise)
        slots = "" if host.slots is None else f" {data.draw(blank)}slots={host.slots}"
        lines.append(f"{data.draw(blank)}{host.name}{slots}{data.draw(st.sampled_from(['', ' # note', '#']))}")
    assert parse(data.draw(st.sampled_from(["\n", "\r\n"])).join(lines)) == hosts
