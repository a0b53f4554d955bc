"""The charts of a report in a real browser: what is drawn, what the legend shows, and text of the run as text."""

import asyncio
import json

import pytest
from recordings import record
from top.pictures import Run
from view.browsing import browser

from asyncrl.observe.pages import policy, resource_text
from asyncrl.observe.report.panels import Curve, Panel, draw
from asyncrl.observe.report.report import SCRIPTS, STYLES, write_report

EVIL = "<img src=x onerror=\"document.title='owned'\"></script>"


def look(tmp_path, html, script):
    """What ``script`` returns in a page of these panels, or in the page of a whole report."""
    if not html.startswith("<!doctype"):
        styles, scripts = ([resource_text(name) for name in names] for names in (STYLES, SCRIPTS))
        head = f"<meta charset=utf-8>{policy(scripts, styles)}{''.join(f'<style>{style}</style>' for style in styles)}"
        html = f"<!doctype html><title>report</title>{head}<body>{html}"
        html += "".join(f"<script>{each}</script>" for each in scripts)
    (tmp_path / "page.html").write_text(html)

    async def run():
        async with browser(tmp_path / "profile") as page:
            await page.open(f"file://{tmp_path}/page.html")
            await page.until("document.readyState === 'complete'")
            charts = "document.querySelectorAll('figure.chart')"
            await page.until(f"[...{charts}].every(each => each.querySelector('canvas'))")
            found = await page.run(script)
            assert page.complaints == []
            return found

    return asyncio.run(run())


def legends(at):
    """A script: the legend of each chart with the pointer at the share ``at`` of its width."""
    return f"""Promise.all([...document.querySelectorAll('figure.chart')].map(async chart => {{
        const over = chart.querySelector('.u-over'), box = over.getBoundingClientRect();
        const [clientX, clientY] = [box.left + {at} * box.width, box.top + 5];
        const event = new MouseEvent('mousemove', {{ clientX, clientY, bubbles: true }});
        over.dispatchEvent(new MouseEvent('mouseenter', event));
        over.dispatchEvent(event);
        await new Promise(resolve => setTimeout(resolve, 100));
        const rows = [...chart.querySelectorAll('.u-series')];
        return rows.map(row => [...row.children].map(each => each.textContent).join(': '));
    }}))"""


def colours(chart=0):
    """A script: the share of the pixels of a chart that have each of its commonest colours."""
    return f"""(() => {{
        const canvas = document.querySelectorAll('canvas')[{chart}], counts = {{}};
        const pixels = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data;
        for (let at = 0; at < pixels.length; at += 4) {{
            const colour = [...pixels.slice(at, at + 3)].map(each => each.toString(16).padStart(2, '0')).join('');
            if (pixels[at + 3] === 255) counts[colour] = (counts[colour] || 0) + 1;
        }}
        return counts;
    }})()"""


def test_the_legend_has_the_values_under_the_pointer_with_their_notes(tmp_path):
    curves = [
        Curve(name="all", colour="#3b6fb6", x=[1, 2, 3], y=[0.1, 0.2, 0.3]),
        Curve(name="eval", colour="#e08a2c", x=[3], y=[0.5], marks="line and dots", notes=["version 2"]),
        Curve(name="dots", colour="#4f9d5d", x=[3, 3, 3], y=[1e-5, 2.0, 3.0], marks="dots"),
    ]
    stacked = [
        Curve(name=name, colour="#c8504b", x=[0.0, 10.0], y=y) for name, y in (("a", [0.25, 1]), ("b", [0.75, 0]))
    ]
    time = Panel(curves=stacked, stack="bars", widths=[10.0, 10.0], shares=True, origin=1.7e9, across="time (UTC)")
    html = draw(Panel(curves=curves, across="step")) + draw(time)
    first, second = look(tmp_path, html, legends(0.98))
    assert first == ["step: 3", "all: 0.3", "eval: 0.5, version 2", "dots: 1.00e-5"]
    assert second == ["time (UTC): 2023-11-14 22:13:30", "b: 0.0 %", "a: 100.0 %"], "the highest of a stack comes first"
    first, second = look(tmp_path, html, legends(0.02))
    assert first == ["step: 1", "all: 0.1", "eval: –", "dots: –"] and second[1:] == ["b: 75.0 %", "a: 25.0 %"]


def test_a_stack_fills_its_frame_by_shares(tmp_path):
    x = [0.0, 1.0, 2.0]
    curves = [Curve(name=c, colour=c, x=x, y=[share] * 3) for c, share in (("#4f9d5d", 0.25), ("#c8504b", 0.75))]
    panels = Panel(curves=curves, stack="areas", shares=True), Panel(curves=curves, stack="bars", widths=[1.0] * 3)
    for counts in look(tmp_path, "".join(map(draw, panels)), f"[{colours(0)}, {colours(1)}]"):
        assert counts["c8504b"] == pytest.approx(3 * counts["4f9d5d"], rel=0.05) and counts["4f9d5d"] > 10_000


def test_all_finite_values_are_drawn(tmp_path):
    html = ""
    for values in (
        [0.0, 0.0],
        [1.00001, 1.00003],
        [1e300, -1e300],
        [1e308, 1e308],
        [1e-300, 2e-300],
        [-5e-324, 5e-324],
    ):
        far = Curve(name="far", colour="#3b6fb6", x=[-1e308, 1e308], y=values, marks="line and dots")
        lone = Curve(name="lone", colour="#3b6fb6", x=[7.0], y=values[:1])
        steps = Curve(name="steps", colour="#3b6fb6", x=[1, 2], y=values)
        html += "".join(
            draw(Panel(curves=[curve], zero=zero)) for curve in (far, lone, steps) for zero in (True, False)
        )
    count = html.count("<figure")
    script = f"[{', '.join(map(colours, range(count)))}].map(each => each['3b6fb6'] || 0)"
    found = look(tmp_path, html, script)
    assert len(found) == 36 and min(found) > 10, found


def test_text_of_a_run_stays_text(tmp_path):
    run_dir = tmp_path / "a<b>&c"
    run_dir.mkdir()
    (run_dir / "config.json").write_text(json.dumps({"model": {"path": EVIL}}))
    lines = [
        {"kind": "train", "step": 1, "start": 1, "weights/version": 1, "reward/mean": 0.5, "weights/stall_s": 0.1},
        {"kind": "eval", "step": 1, "start": 1, f"eval/{EVIL}/mean": 0.5, f"eval/{EVIL}/pass_at/1": 0.5},
        {
            "kind": "update",
            "step": 1,
            "start": 1,
            "weights/version": 1,
            "weights/transport": EVIL,
            "weights/stall_s": 1,
        },
    ]
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    record(run_dir, *(Run(reason=EVIL).at(t) for t in (10, 20)))
    write_report(run_dir, tmp_path / "out.html")
    found = look(
        tmp_path, (tmp_path / "out.html").read_text(), "[document.title, document.querySelectorAll('img').length]"
    )
    assert found == ["a<b>&c – asyncrl", 0]
    assert any(
        EVIL in row for chart in look(tmp_path, (tmp_path / "out.html").read_text(), legends(0.5)) for row in chart
    )
