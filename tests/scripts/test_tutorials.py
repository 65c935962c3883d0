"""The tutorials of docs/ do what they say: each is followed block by block, in an empty folder, as a user would.

How a block opens says what it is:

    ```bash             commands; they must not fail, and the next block goes on in the folder where they ended
    ```text             right behind `bash`: what the commands print, with `...` for what is left out or varies;
                        figures such as 4.21 and 1,024 may be others
    ```KIND title="F"   the file F
    anything else       is only shown: `sh` what needs another machine, the hub or another program
"""

import doctest
import os
import re
import sys
from pathlib import Path

import pytest
from external_commands import require
from harness import ROOT, commands, environment, run

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
BLOCK = re.compile(r'^```(?P<kind>\w+)(?: title="(?P<file>[^"]+)")?\n(?P<body>.*?)^```$', re.MULTILINE | re.DOTALL)
LOOSELY = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
FIGURE = re.compile(r"\d[\d,]*\.\d+(e[-+]\d+)?|\d+(,\d{3})+|\d+e-\d+")
# What commands that are only shown begin with, or name; `--as gguf` needs an extra, and has tests of its own.
ELSEWHERE = re.compile(r"^(vllm|curl|llama-\w+|ollama|rsync|ssh|sbatch|kubectl|pip) |meta-llama/|--as gguf-")


def follow(text: str, folder: Path, python: str) -> int:
    """Does what a tutorial says in a folder; returns how many blocks of commands it has.

    Args:
        python: What runs commands of Python.
    """
    require("bash")
    path = f"{commands(folder, python)}:{os.environ['PATH']}"
    # A laptop: no GPU. What `rich` prints is as wide as a terminal.
    env = environment(PATH=path, WHERE=str(folder / "where"), CUDA_VISIBLE_DEVICES="", COLUMNS="100")
    place, printed, count = folder / "user", None, 0
    place.mkdir()
    for block in BLOCK.finditer(text):
        kind, file, body = block["kind"], block["file"], block["body"]
        if file is not None:
            (place / file).write_text(body, encoding="utf-8")
        elif kind == "bash":
            # What a failed block has started ends with it.
            script = f'trap "kill \\$(jobs -p) 2>/dev/null || true" EXIT\n{body}\npwd > "$WHERE"'
            code, printed = run(["bash", "-euo", "pipefail", "-c", script], cwd=place, env=env)
            assert code == 0, f"{body}ended with {code}:\n{printed[-4000:]}"
            place, count = Path((folder / "where").read_text().strip()), count + 1
            continue
        elif kind == "text":
            assert printed is not None, f"no commands stand before:\n{body}"
            fits = doctest.OutputChecker().check_output(FIGURE.sub("#", body), FIGURE.sub("#", printed), LOOSELY)
            assert fits, f"said to print:\n{body}\nprinted:\n{printed[-6000:]}"
        printed = None
    return count


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial(tutorial: Path, tmp_path: Path, quick_python: str) -> None:
    # Where machines and launchers are killed, they are what a user would kill.
    python = sys.executable if tutorial.stem == "laptop-to-cluster" else quick_python
    assert follow(tutorial.read_text(encoding="utf-8"), tmp_path, python) >= 3


@pytest.mark.parametrize("tutorial", TUTORIALS, ids=lambda path: path.stem)
def test_only_what_cannot_run_here_is_only_shown(tutorial: Path) -> None:
    blocks = [*BLOCK.finditer(tutorial.read_text(encoding="utf-8"))]
    assert not {block["kind"] for block in blocks} & {"console", "shell", "zsh"}
    for body in (block["body"].replace("\\\n", "") for block in blocks if block["kind"] == "sh"):
        for line in body.splitlines():
            assert line.startswith("#") or ELSEWHERE.search(line), f"can run here: {line}"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("```bash\nfinetune nonesuch\n```\n", "ended with 2"),
        ("```bash\nfalse | true\ntrue\n```\n", "ended with 1"),
        ("```bash\necho one\n```\n\n```text\ntwo\n```\n", "said to print"),
        ("```bash\necho one; echo two\n```\n```text\n...\none\n```\n", "said to print"),
        ("```bash\necho step 3, 4.5 s\n```\n```text\nstep 4, 4.5 s\n```\n", "said to print"),
        ("```bash\necho one\n```\n```yaml\na: 1\n```\n```text\none\n```\n", "no commands stand before"),
        ('```yaml title="a.yaml"\na: 1\n```\n```bash\ngrep 2 a.yaml\n```\n', "ended with 1"),
    ],
)
def test_a_broken_tutorial_is_seen(text: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=re.escape(says)):
        follow(text, tmp_path, sys.executable)


def test_a_tutorial_that_is_right(tmp_path: Path) -> None:
    text = (
        '```bash\nmkdir a\ncd a\n```\n\n```yaml title="b"\nc: 1\n```\n\n```bash\ncat b\necho step 2: loss 3.25\n```\n\n'
        "```text\nc: 1\nstep 2: loss 3.31...\n```\n\n```sh\nfalse\n```\n"
    )
    assert follow(text, tmp_path, sys.executable) == 2
