"""The page in a real browser: what it shows, its keys and links, a live run, and hostile rollouts as text."""

import asyncio
import re
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from view.browsing import browser
from view.viewed_run import group, make_run, server_of, train_line, write_groups, write_steps

from asyncrl.view.answers import Answers
from asyncrl.view.page import step_page

FIRST, SECOND = "document.getElementById('first').innerText", "document.getElementById('second').innerText"
DRAWN = "(document.body?.dataset.drawn === location.hash)"


@asynccontextmanager
async def opened(tmp_path, *runs, at=""):
    server = server_of(*runs)
    async with browser(tmp_path / "profile") as page:
        try:
            await page.open(await server.start() + at)
            await page.until(DRAWN)
            yield page
            assert page.complaints == []
        finally:
            await server.close()


@pytest.fixture
def run_dir(tmp_path):
    return make_run(tmp_path)


def test_a_reader_walks_by_keys_and_every_view_has_a_link(run_dir, tmp_path):
    async def walk():
        async with opened(tmp_path, run_dir) as page:
            assert await page.run("document.querySelectorAll('#steps td a').length") == 6
            assert "step=5" in await page.run("location.hash")
            await page.press("j")
            await page.until(f"{DRAWN} && {FIRST}.includes('2+2=')")
            assert "held" in await page.run(FIRST)
            await page.run("location.hash = '#step=5&uid=0-2&sample=2'")
            await page.until(f"{FIRST}.includes('It rains.')")
            shown = await page.run(FIRST)
            for text in (
                "I need a tool.",
                "calls weather",
                '{"city": "Bern"}',
                "tool weather",
                "reward 0.5",
                "staleness 1",
            ):
                assert text in shown, text
            await page.press("t")
            await page.until("document.querySelectorAll('#first .tokens span').length === 3")
            colour = "document.querySelector('#first .tokens span').style.backgroundColor"
            assert "110" not in await page.run(colour) and await page.run(colour)
            assert "log-prob -0.5" in await page.run("document.querySelector('#first .tokens span').title")
            # The learner's values are not recorded of these tokens.
            lacking = "[...document.querySelectorAll('#first option:disabled')].map(each => each.value).join()"
            assert await page.run(lacking) == "entropy,ratio,drift"
            await page.press("[")
            await page.until("location.hash.includes('step=4')")
            await page.run("history.back()")
            await page.until("location.hash.includes('step=5')")

    asyncio.run(walk())


def test_tokens_have_the_colours_of_the_learner_s_values_and_the_judge_s_words_are_shown(run_dir, tmp_path):
    async def look():
        async with opened(tmp_path, run_dir, at="#step=5&uid=0-2&sample=1") as page:
            assert "the judge’s words\nWell done." in await page.run(FIRST)
            token, shown = "document.querySelector('#first .tokens span')", {}
            for mode in ("logprob", "entropy", "ratio", "drift", "version"):
                await page.run(f"location.hash = '#step=5&uid=0-2&sample=1&view=tokens&colour={mode}'")
                await page.until(f"{DRAWN} && document.querySelector('#first select').value === '{mode}'")
                shown[mode] = await page.run(f"{token}.style.backgroundColor")
            assert len(set(shown.values())) == 5, shown
            assert "at training 0.4, ratio 1.649" in (title := await page.run(f"{token}.title"))
            assert "entropy 2.5 nats" in title

    asyncio.run(look())


def test_the_chart_of_steps_leads_to_them_and_the_report_back(run_dir, tmp_path):
    async def walk():
        async with opened(tmp_path, run_dir) as page:
            over = "document.querySelector('#steps .u-over').getBoundingClientRect()"
            place = {"x": await page.run(f"{over}.left") + 1, "y": await page.run(f"{over}.top") + 5, "button": "left"}
            for kind in ("mouseMoved", "mousePressed", "mouseReleased"):
                await page.call("Input.dispatchMouseEvent", type=kind, clickCount=1, **place)
            await page.until("location.hash.includes('step=1')")
            await page.run("document.querySelector('#runs a[href^=report]').click()")
            await page.until("document.querySelector('figure.chart canvas')")
            await page.run("document.querySelector('header a').click()")
            await page.until("document.querySelector('#steps td a')")

    asyncio.run(walk())


def test_two_runs_stand_side_by_side_for_the_same_prompt(run_dir, tmp_path):
    other = make_run(tmp_path, "other")

    async def compare():
        async with opened(tmp_path, run_dir, other, at="#step=4&uid=0-1&sample=0") as page:
            await page.press("s")
            link = "document.querySelector(`#hits a[href*='run2=1'][href*='uid2=0-2']`)"
            await page.until(link)
            await page.run(f"{link}.click()")
            await page.until(f"{SECOND}.includes('alpha')")
            assert "other: trained" in await page.run(SECOND) and "trial: trained" in await page.run(FIRST)
            await page.press("Escape")
            await page.press("Escape")
            await page.until("document.getElementById('second').hidden")

    asyncio.run(compare())


def test_a_search_finds_texts_and_leads_to_them(run_dir, tmp_path):
    async def search():
        async with opened(tmp_path, run_dir) as page:
            await page.press("/")
            await page.run(
                "document.getElementById('query').value = 'BETA'; document.getElementById('search').requestSubmit()"
            )
            await page.until("document.querySelector('#hits a.row')")
            await page.run("document.querySelector('#hits a.row').click()")
            await page.until("document.querySelector('#first mark')")
            assert await page.run("document.querySelector('#first mark').textContent") == "beta"

    asyncio.run(search())


def test_steps_of_a_live_run_appear(run_dir, tmp_path):
    async def watch():
        async with opened(tmp_path, run_dir) as page:
            write_steps(run_dir, train_line(6))
            write_groups(run_dir, "step_000006.jsonl", group("0-8", 6))
            await page.until("document.querySelector('#steps td a').textContent === '6'")
            assert "step=5" in await page.run("location.hash"), "the chosen step stays"

    asyncio.run(watch())


def test_a_hostile_rollout_is_text(run_dir, tmp_path):
    async def attack():
        async with opened(tmp_path, run_dir) as page:
            for sample, view in ((0, ""), (1, ""), (0, "tokens")):
                await page.run(f"document.querySelectorAll('#groups a[href*=script]')[{sample}].click()")
                await page.until(f"{DRAWN} && {FIRST}.includes('owned')")
                if view:
                    await page.press("t")
                    await page.until("document.querySelectorAll('#first .tokens span').length === 40")
            assert await page.run("document.title") == "trial – asyncrl-view"
            assert await page.run("document.querySelectorAll('img, main script').length") == 0

    asyncio.run(attack())


def test_a_sent_page_needs_no_server(run_dir, tmp_path):
    (tmp_path / "sent.html").write_text(step_page(Answers([run_dir], [chr]), 5))

    async def read():
        async with browser(tmp_path / "profile") as page:
            await page.open(f"file://{tmp_path}/sent.html#step=5&uid=0-2&sample=0&view=tokens")
            await page.until("document.querySelectorAll('#first .tokens span').length === 2")
            await page.press("k")
            await page.until(f"{DRAWN} && document.querySelectorAll('#groups a.row').length === 7")
            await page.run("document.querySelector('#groups a[href*=script]').click()")
            await page.until(f"{DRAWN} && {FIRST}.includes('owned')")
            assert await page.run("document.title") == "trial – asyncrl-view"
            assert await page.run("document.querySelectorAll('img, main script').length") == 0
            assert page.complaints == []

    asyncio.run(read())


def test_ten_thousand_steps_open_within_two_seconds_and_half_a_gigabyte(run_dir, tmp_path):
    values = {f"metric/{number}": number / 7 for number in range(90)}
    write_steps(run_dir, *(train_line(step, **values) for step in range(6, 10_001)))
    command = [sys.executable, "-m", "asyncrl.cli.view", str(run_dir)]

    async def look(url):
        async with browser(tmp_path / "profile") as page:
            took = []
            # The machine may be busy with something else.
            while len(took) < 5 and min(took, default=9.0) > 2.0:
                await page.open(f"{url}#step=5000&until=5049")
                await page.until(DRAWN)
                took.append(await page.run("performance.now()") / 1000)
                assert await page.run("document.querySelectorAll('#steps td a').length") == 100
                assert await page.run("document.querySelector('#steps .chosen a').textContent") == "5000"
            assert min(took) <= 2.0, took
            assert await page.run("performance.memory.usedJSHeapSize") < 100e6
            await page.run(f"location.href = '{url}report'")
            await page.until("document.querySelector('figure.chart canvas')")
            assert page.complaints == []

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as view:
        try:
            asyncio.run(look(view.stdout.readline().strip()))
            status = Path(f"/proc/{view.pid}/status").read_text()
            assert int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) < 500_000
        finally:
            view.kill()
