"""Builds the docs site into build/docs: `make docs`.

Pages link to each other, and to other files of the repository, as they lie there: they can be read as plain Markdown.
Here they are put together in build/pages with the files that they link to, and Zensical makes a site of them.
A link to a file, heading or docstring that is not there ends the build, as does a page that the navigation lacks.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

from finetune.cli.main import build_parser

ROOT = Path(__file__).resolve().parent.parent
DOCS, PAGES = ROOT / "docs", ROOT / "build" / "pages"
FENCED = re.compile(r"^( *)(`{3,})[^`].*?^\1\2$", re.MULTILINE | re.DOTALL)
TARGET = re.compile(r"(?<=\]\()(?!#)[^)#]+(?=[)#])")


def main() -> int:
    shutil.rmtree(PAGES, ignore_errors=True)
    configuration = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    navigation = set(re.findall(r"[\w./-]+\.md\b", yaml.safe_dump(configuration["nav"])))
    waiting = {path for path in DOCS.rglob("*") if path.is_file()}
    waiting |= {ROOT / page.removeprefix("repository/") for page in navigation if page.startswith("repository/")}
    done: set[Path] = set()
    while waiting:
        path = waiting.pop()
        done.add(path)
        waiting |= _put(path) - done
    if lacking := {str(_place(path).relative_to(PAGES)) for path in done if path.suffix == ".md"} ^ navigation:
        raise SystemExit(f"mkdocs.yml: `nav` and the pages differ in {', '.join(sorted(lacking))}.")
    zensical = [sys.executable, "-m", "zensical", "build", "--clean", "--strict"]
    return subprocess.run(zensical, cwd=ROOT, check=False).returncode


def _put(path: Path) -> set[Path]:
    """Puts a file where the site is made of, its links changed to match; returns the files that it links to."""
    place, linked = _place(path), set()
    place.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copy(path, place)
        return linked

    def follow(target: re.Match[str]) -> str:
        if target[0].startswith("https://"):
            return target[0]
        file = (path.parent / target[0]).resolve()
        if not (file.is_file() and file.is_relative_to(ROOT)):
            raise SystemExit(f"{path.relative_to(ROOT)}: {target[0]} is neither https:// nor a file of the repository.")
        linked.add(file)
        return os.path.relpath(_place(file), place.parent)

    text, end, parts = path.read_text(encoding="utf-8"), 0, []
    for fenced in [*FENCED.finditer(text), None]:
        begin = len(text) if fenced is None else fenced.start()
        parts.append(TARGET.sub(follow, text[end:begin]))
        if fenced is not None:
            parts.append(fenced[0])
            end = fenced.end()
    # A bar in the code of a table is escaped for GitHub, and shown as it is by Zensical.
    page = re.sub(r"`[^`\n]+`", lambda code: code[0].replace(r"\|", "|"), "".join(parts))
    if path == DOCS / "cli.md":
        page = page.replace("<!-- commands -->", _commands())
    place.write_text(page, encoding="utf-8")
    return linked


def _place(path: Path) -> Path:
    if path.is_relative_to(DOCS):
        return PAGES / path.relative_to(DOCS)
    return PAGES / "repository" / path.relative_to(ROOT)


def _commands() -> str:
    """What `finetune COMMAND --help` prints, of each."""
    os.environ["COLUMNS"] = "88"
    verbs = next(action.choices for action in build_parser()._actions if isinstance(action.choices, dict))
    return "".join(f"## {name}\n\n```text\n{verb.format_help()}```\n\n" for name, verb in verbs.items())


if __name__ == "__main__":
    sys.exit(main())
