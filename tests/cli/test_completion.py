"""Shell completion, as bash has it."""

import subprocess
import sys
from pathlib import Path

import pytest
from external_commands import require
from harness import ROOT, environment

# What the shell's function does: the command answers on the descriptor 8.
ASK = """
export COMP_LINE="$1" COMP_POINT=${#1} COMP_TYPE=9 _ARGCOMPLETE=1 _ARGCOMPLETE_IFS=' ' _ARGCOMPLETE_SHELL=bash
exec 3>&1
"$2" -c 'import sys; from finetune.cli.main import main; sys.argv[0] = "finetune"; main(sys.argv[1:])' 8>&3 9>/dev/null
"""


def complete(line: str, cwd: Path = ROOT) -> list[str]:
    require("bash")
    done = subprocess.run(
        ["bash", "-c", ASK, "bash", line, sys.executable], cwd=cwd, env=environment(), capture_output=True, text=True
    )
    return done.stdout.split()


@pytest.mark.parametrize(
    ("line", "among"),
    [
        ("finetune la", "launch"),
        ("finetune launch --config_file fs", "fsdp_offload"),
        ("finetune launch --config_file fsdp sam", "sample"),
        ("finetune launch --config_file fsdp sample optim.", "optim.lr="),
        ("finetune parity sample --on single,ze", "single,zero3"),
        ("finetune explain sample --js", "--json"),
    ],
)
def test_words(line: str, among: str) -> None:
    found = complete(line)
    assert among in found
    start = line.rpartition(" ")[2]
    assert all(word.startswith(start) for word in found)


def test_a_section_takes_no_value() -> None:
    found = complete("finetune show sample o")
    assert "optim.lr=" in found
    assert "optim=" not in found


def test_run_directories(tmp_path: Path) -> None:
    for name in ("runs/one", "runs/two", "runs/.hidden", "else"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "runs" / "one" / "run.json").write_text("{}")
    assert complete("finetune export ", tmp_path) == ["else/", "runs/"]
    assert complete("finetune export runs/", tmp_path) == ["runs/one", "runs/two/"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_each_shell(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    from finetune.cli.main import main

    assert main(["completion", shell]) == 0
    assert "finetune" in capsys.readouterr().out
