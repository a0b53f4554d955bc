"""The server and the command asyncrl-view: loopback alone, no other site, no script but its own, no torch."""

import asyncio
import re
import signal
import subprocess
import sys
import urllib.request

import aiohttp
import msgspec
import pytest
from view.viewed_run import make_run, server_of

from asyncrl.cli import view as command
from asyncrl.observe.pages import resource_text
from asyncrl.view import server as module

VIEW = (sys.executable, "-m", "asyncrl.cli.view")


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path / "runs")


def asked(run_dir, path, method="GET", **headers):
    """(status, headers, body) of a request to a server of the run."""

    async def request():
        server = server_of(run_dir)
        try:
            url = await server.start()
            assert re.fullmatch(r"http://127\.0\.0\.1:\d+/", url)
            async with aiohttp.ClientSession() as client, client.request(method, url + path, headers=headers) as got:
                return got.status, got.headers, await got.read()
        finally:
            await server.close()

    return asyncio.run(request())


def test_the_page_and_its_files_are_served_with_a_policy_that_allows_only_them(run_dir):
    for path, kind in (
        ("", "text/html"),
        ("view.js", "text/javascript"),
        ("view.css", "text/css"),
        ("uplot.js", "text/javascript"),
        ("uplot.css", "text/css"),
        ("#run=0", "text/html"),
    ):
        status, headers, body = asked(run_dir, path)
        assert status == 200 and headers["Content-Type"] == f"{kind}; charset=utf-8" and body
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "script-src 'self'" in policy and "unsafe" not in policy
        assert headers["X-Content-Type-Options"] == "nosniff"
    assert asked(run_dir, "..%2f..%2fconfig.json")[0] == 404


def test_the_script_takes_no_markup():
    for name in ("view/view.js", "observe/report/report.js", "observe/uplot/uPlot.iife.min.js"):
        text = resource_text(name)
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|eval\(", text), name


def test_the_report_is_served_with_the_policy_of_its_page_and_links_back(run_dir):
    status, headers, body = asked(run_dir, "report?run=0")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'" and b"script-src 'sha256-" in body
    assert b'<a href="./#run=0">asyncrl-view trial</a>' in body
    assert asked(run_dir, "report?run=3")[0] == 404
    (run_dir / "config.json").unlink()
    status, _, body = asked(run_dir, "report")
    assert status == 404 and b"holds no config.json" in body


def test_answers_are_json_and_refusals_say_why(run_dir, monkeypatch):
    status, headers, body = asked(run_dir, "api/steps?count=1")
    assert status == 200 and headers["Content-Type"] == "application/json" and "nosniff" in headers.values()
    assert msgspec.json.decode(body)["steps"][0]["step"] == 5
    for path, expected in (("api/steps?count=x", 400), ("api/nothing", 404), ("api/groups?step=5&run=3", 404)):
        status, _, body = asked(run_dir, path)
        assert status == expected and msgspec.json.decode(body)["error"]
    assert asked(run_dir, "api/steps", method="POST")[0] == 405
    monkeypatch.setattr(module, "MOST_BYTES", 10)
    assert b"above the limit of 10" in asked(run_dir, "api/steps")[2]


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("localhost:9999", 200),
        ("127.0.0.1", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("evil.example:8080", 421),
        ("127.0.0.1.evil.example", 421),
        ("localhost@evil.example", 421),
        ("[", 421),
    ],
)
def test_only_a_name_of_this_machine_is_answered(run_dir, host, status):
    assert asked(run_dir, "api/runs", Host=host)[0] == status
    assert asked(run_dir, "", Host=host)[0] == status


def test_a_file_that_cannot_be_read_is_reported(run_dir):
    (run_dir / "metrics.jsonl").unlink()
    (run_dir / "metrics.jsonl").mkdir()
    status, _, body = asked(run_dir, "api/steps")
    assert status == 500 and "directory" in msgspec.json.decode(body)["error"]


def test_the_command_serves_until_it_is_interrupted(run_dir):
    with subprocess.Popen([*VIEW, "trial"], cwd=run_dir.parent.parent, stdout=subprocess.PIPE, text=True) as process:
        try:
            url = process.stdout.readline().strip()
            assert url.startswith("http://127.0.0.1:")
            with urllib.request.urlopen(f"{url}api/runs", timeout=60) as answer:
                assert answer.read() == b'{"runs":["trial"]}'
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == 130
        finally:
            process.kill()


def test_a_step_is_written_as_a_page_and_tokens_have_their_text(run_dir, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert command.main(["--export", "out.html"]) == 0 and capsys.readouterr().out == "out.html\n"
    assert '[[97,"a",-2.0,5,"sampled",null,null]' in (tmp_path / "out.html").read_text(), (
        "a run without a model has bytes as tokens"
    )
    assert command.main(["trial", "--export", "out.html", "--step", "1"]) == 1
    assert "step 1 has no recorded groups" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["nowhere"], "nowhere: no such folder"),
        (["trial", "--step", "3"], "--step belongs to --export"),
        (["trial", "--export", "x.html", "--step", "-1"], "--step is 0 or more"),
        (["trial", "trial", "--export", "x.html"], "--export takes one RUN"),
        (["--port", "70000"], "--port is 0 to 65535"),
        (["trial", "--export", "no/such/x.html"], "there is no folder"),
        (["empty"], "this is not the folder of a run"),
    ],
)
def test_wrong_usage_ends_with_2(run_dir, tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    try:
        code = command.main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 2 and says in capsys.readouterr().err


def test_help_loads_nothing_and_a_page_needs_no_torch(run_dir):
    def loaded(words):
        code = f"""
import sys
sys.modules["torch"] = sys.modules["transformers"] = None
from asyncrl.cli import view
try:
    view.main({words!r})
except SystemExit:
    pass
print([name for name in ("torch", "aiohttp", "zmq", "msgspec", "numpy") if sys.modules.get(name)])
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
        return done.stdout.splitlines()[-1]

    assert loaded(["--help"]) == "[]"
    out = run_dir.parent / "out.html"
    assert "aiohttp" not in loaded([str(run_dir), "--export", str(out)]) and out.is_file()


def test_without_aiohttp_the_command_says_what_to_install(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    assert command.main([str(run_dir)]) == 1
    assert "pip install 'asyncrl[episodes]'" in capsys.readouterr().err


def test_tokens_of_a_model_of_the_hub_get_the_text_of_its_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    commit = "0" * 40
    settings = {"model": {"path": "org/name"}, "hub": {"pinned": {"model.path": f"org/name@{commit}"}}}
    (tmp_path / "config.json").write_bytes(msgspec.json.encode(settings))
    assert command._decoder(tmp_path) is None
    folder = tmp_path / "cache" / "models--org--name" / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "tokenizer.json").write_text("{}")
    assert command._decoder(tmp_path) is not None
