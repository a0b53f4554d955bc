"""The pages: links work, the index and the site list every page, and citations name this version."""

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest
import yaml

from tools.page_tables import TABLES, renewed

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)


@cache
def prose(page):
    return FENCED.sub("", page.read_text())


@cache
def anchors(page):
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def listed(nav):
    for entry in nav:
        if isinstance(entry, str):
            yield entry
        else:
            for inner in entry.values():
                yield from listed(inner)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_has_a_target(page):
    broken = []
    for target in LINK.findall(prose(page)):
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.is_file() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


def test_the_index_and_the_site_list_each_page_once_in_one_order():
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}
    ordered = re.findall(r"^\d+\. \[[^]]+\]\(([\w-]+\.md)\)", prose(DOCS / "index.md"), re.MULTILINE)
    assert sorted(ordered) == sorted(pages)
    first, *rest = listed(yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"])
    assert (first, rest) == ("index.md", ordered)


def test_pictures_load_nothing_from_elsewhere():
    for picture in (DOCS / "figures").glob("*.svg"):
        assert not re.search(r"url\(\s*[\"']?\w+:|(href|src)\s*=\s*[\"']\w+:|@import", picture.read_text()), (
            picture.name
        )


def test_the_citation_names_this_version():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert (citation["version"], citation["license"]) == (project["version"], project["license"])
    assert citation["repository-code"] == project["urls"]["Repository"]
    assert [author["name"] for author in citation["authors"]] == [author["name"] for author in project["authors"]]


def test_the_workflow_runs_the_commands_of_a_clone():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())["jobs"]
    commands = [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]
    assert any(command.endswith(" .ci/run") for command in commands)
    assert {"make docs", "make setup test-slow DRAWS=3"} < {*commands}
    assert all(job["timeout-minutes"] for job in jobs.values())


@pytest.mark.parametrize(
    "form", sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*_*.yml")), ids=lambda form: form.stem
)
def test_a_form_asks_each_thing_once(form):
    found = yaml.safe_load(form.read_text())
    asked = [part["id"] for part in found["body"] if part["type"] != "markdown"]
    assert found["name"] and found["description"] and asked and len(asked) == len(set(asked))


@pytest.mark.parametrize("page", sorted({page for page, _ in TABLES.values()}))
def test_tables_match_the_declarations(page):
    text = (DOCS / page).read_text()
    assert renewed(page, text) == text, "python -m tools.page_tables"
