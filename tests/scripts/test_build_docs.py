"""`make docs`: the site is whole, asks nothing of the network, and is not built where something in it is broken."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from chromium import Page, chromium, needs_chromium
from harness import ROOT, environment

PAGES = ("index.html", "tutorials/first-run.html", "api-reference.html", "cli.html", "launch.html")


def build(tree: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(tree / "scripts" / "build_docs.py")]
    env = environment(NO_COLOR="1")
    return subprocess.run(words, cwd=tree, env=env, capture_output=True, text=True, check=False)


def copy_sources(folder: Path) -> Path:
    """What the site is built from."""
    for name in ("docs", "scripts"):
        shutil.copytree(ROOT / name, folder / name)
    for file in (*ROOT.glob("*.md"), ROOT / "mkdocs.yml"):
        shutil.copy(file, folder)
    (folder / "finetune").symlink_to(ROOT / "finetune")
    return folder


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources, and the site."""
    folder = copy_sources(tmp_path_factory.mktemp("docs"))
    done = build(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_what_is_made_here_is_there(tree: Path) -> None:
    site = tree / "build" / "docs"
    assert 'id="finetune.tasks.task.Task.loss_sum"' in (site / "api-reference.html").read_text()
    commands = (site / "cli.html").read_text()
    assert 'id="doctor"' in commands
    assert "--max_restarts" in commands
    # A file of the repository that a page links to.
    assert (site / "repository" / "scripts" / "measure_peak.py").read_bytes() == (
        ROOT / "scripts" / "measure_peak.py"
    ).read_bytes()


def test_no_page_loads_anything_from_elsewhere(tree: Path) -> None:
    loads = re.compile(
        r'<(?:script|img|iframe|source)\b[^>]*\bsrc="?(?:https?:)?//|<link\b[^>]*\bhref="?(?:https?:)?//'
    )
    pages = [*(tree / "build" / "docs").rglob("*.html")]
    assert len(pages) > 30
    assert [page.name for page in pages if loads.search(page.read_text(encoding="utf-8"))] == []


@needs_chromium
@pytest.mark.parametrize(("theme", "width", "scheme"), [("light", 1280, "default"), ("dark", 390, "slate")])
def test_in_a_browser(tree: Path, theme: str, width: int, scheme: str) -> None:
    site = tree / "build" / "docs"
    with chromium() as browser:
        for name in PAGES:
            page = browser.open(site / name, width=width, theme=theme)
            assert page.overflow() <= 0, name
            # What cannot be loaded is an error there, and nothing can be from the network.
            assert page.console() == [], name
            assert page.js("return document.body.dataset.mdColorScheme") == scheme
        for word, title in (("bandwidth", "Measure links"), ("stopping", "Early stopping"), ("rate", "The learning")):
            search(browser.open(site / name, width=width, theme=theme), word, title)


def search(page: Page, word: str, title: str) -> None:
    """Searches for a word, and waits until the page of this title is found."""
    from selenium.webdriver.common.action_chains import ActionChains

    page.js("document.querySelector('[data-md-toggle=search]').click()")
    shown = "[...document.querySelectorAll('*')].map((e) => e.shadowRoot).find((r) => r?.querySelector('input'))"
    page.wait(f"return {shown}?.activeElement?.tagName === 'INPUT'")
    ActionChains(page.driver).send_keys(word).perform()
    # The words before the last letter find other pages.
    page.wait(f"return {shown}.querySelector('mark')?.textContent.toLowerCase() === arguments[0]", word)
    page.wait(f"return {shown}.textContent.includes(arguments[0])", title)


@pytest.mark.parametrize(
    ("file", "text", "says"),
    [
        ("docs/launch.md", "[x](nonesuch.md)", "launch.md: nonesuch.md is neither"),
        ("docs/launch.md", "[x](../scripts)", "launch.md: ../scripts is neither"),
        ("docs/launch.md", "[x](http://example.org)", "http://example.org is neither https"),
        ("docs/tutorials/more.md", "# More", "tutorials/more.md"),
        ("mkdocs.yml", "  - More: more.md", "more.md"),
        ("docs/launch.md", "[x](recipe.md#nonesuch)", "anchor does not exist"),
        ("docs/api-reference.md", "::: finetune.tasks.task.Nonesuch", "Could not collect"),
    ],
)
def test_what_is_broken_is_not_built(tmp_path: Path, file: str, text: str, says: str) -> None:
    """In a folder of its own: a build that fails leaves half a site."""
    path = copy_sources(tmp_path) / file
    path.write_text(f"{path.read_text() if path.is_file() else ''}\n{text}\n")
    done = build(tmp_path)
    assert done.returncode != 0
    assert says in done.stdout + done.stderr
