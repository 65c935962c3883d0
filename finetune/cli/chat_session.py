"""A conversation in the terminal with one model, or with two that answer the same turns."""

import json
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from finetune.export.generate_text import generate_text
from finetune.export.load_model import LoadedModel
from finetune.export.sampling_options import SamplingOptions
from finetune.utils import atomic_files, signals
from finetune.utils.errors import DataError, FinetuneError, RecipeError
from finetune.utils.quoting import to_stderr, to_stdout

HELP = """\
/new               forget the conversation
/retry             answer the last turn again; with a temperature, otherwise
/system TEXT       set the system prompt, and begin anew; without a text, take it away
/temperature 0.7   likewise /top-k, /top-p, /max-new-tokens, /seed; `none` takes a limit away
/settings          show them
/save FILE         write the conversation as a line of JSON that `data.train` can read
/quit              end, as Ctrl-D does; Ctrl-C ends an answer only
A line that ends in \\ goes on in the next one."""

_SETTINGS = {field.name.replace("_", "-"): field.name for field in fields(SamplingOptions)}


class ChatSession:
    """The turns so far, what each model answered, and how the next answer is sampled."""

    def __init__(self, models: Mapping[str, LoadedModel], options: SamplingOptions, system: str | None) -> None:
        """
        Args:
            models: By the name to show; the first one has a chat template.

        Raises:
            DataError: If the first model has no chat template.
        """
        self.models, self.options, self.system = models, options, system
        self._asked: list[str] = []
        self._answers: dict[str, list[str]] = {name: [] for name in models}
        self._seed = options.seed
        name, first = next(iter(models.items()))
        if not first.tokenizer.chat_template:
            raise DataError(
                f"{name} has no chat template, so that it was not trained on conversations. Continue a text with it by "
                "`finetune generate`, or train it on conversations first (the recipe's chat section)."
            )
        for other, opened in models.items():
            if not opened.tokenizer.chat_template:
                opened.tokenizer.chat_template = first.tokenizer.chat_template
                to_stderr(f"{other} has no chat template; that of {name} is used.")

    def talk(self) -> None:
        """Reads turns and commands from standard input until it ends."""
        if not sys.stdin.isatty():
            self._read_lines("", "")
            return
        with suppress(ImportError):
            import readline  # noqa: F401 - gives `input` its line editor and history

        to_stderr("Type a message; /help lists commands, /quit ends.")
        # Ctrl-C ends an answer, as often as it comes; other signals still end the process.
        with signals.handle_signals([signal.SIGINT], signal.default_int_handler):
            self._read_lines("> ", ". ")

    def _read_lines(self, first: str, more: str) -> None:
        while True:
            try:
                line = input(first)
                while line.endswith("\\"):
                    line = f"{line[:-1]}\n{input(more)}"
            except EOFError:
                return
            except signals.Interrupted:
                raise
            except KeyboardInterrupt:
                to_stderr("\n/quit ends.")
                continue
            if line.strip() in ("/quit", "/exit"):
                return
            try:
                self._take(line)
            except FinetuneError as error:
                to_stderr(f"{error}")

    def _take(self, line: str) -> None:
        command, _, value = line.strip().partition(" ")
        if not line.startswith("/"):
            if line.strip():
                self._answer([*self._asked, line])
        elif command == "/help":
            print(HELP)
        elif command == "/new":
            self._begin()
        elif command == "/system":
            self.system = value.strip() or None
            self._begin()
        elif command == "/settings":
            print(", ".join(f"{flag} {_shown(getattr(self.options, name))}" for flag, name in _SETTINGS.items()))
        elif command == "/retry":
            if not self._asked:
                raise DataError("There is no turn to answer again yet.")
            self._seed += 1
            self._answer(self._asked)
        elif command == "/save":
            self._save(Path(value.strip()).expanduser() if value.strip() else None)
        elif command[1:] in _SETTINGS:
            self._set(command[1:], value.strip())
        else:
            raise DataError(f"{command} is no command; /help lists them. A message must not begin with a slash.")

    def _begin(self) -> None:
        self._asked, self._answers = [], {name: [] for name in self.models}

    def _set(self, flag: str, value: str) -> None:
        name = _SETTINGS[flag]
        kind = float if name in ("temperature", "top_p") else int
        optional = name in ("top_k", "top_p")
        try:
            changed: dict[str, Any] = {name: None if optional and value == "none" else kind(value)}
        except ValueError:
            numbers = "a number" if kind is float else "a whole number"
            raise RecipeError(f"/{flag} takes {numbers}{' or none' * optional}, not '{value}'.") from None
        self.options = replace(self.options, **changed)
        self._seed = self.options.seed

    def _answer(self, asked: list[str]) -> None:
        """Lets each model answer the last of the turns; what fails leaves the conversation as it was."""
        answers = {}
        for name, opened in self.models.items():
            if len(self.models) > 1:
                to_stdout(f"[{name}]")
            answers[name] = self._stream(opened, self._turns(asked, self._answers[name][: len(asked) - 1]))
        self._asked = asked
        for name, answer in answers.items():
            self._answers[name] = [*self._answers[name][: len(asked) - 1], answer]

    def _turns(self, asked: list[str], answers: list[str]) -> list[dict[str, str]]:
        turns = [{"role": "system", "content": self.system}] if self.system else []
        for number, text in enumerate(asked):
            turns.append({"role": "user", "content": text})
            if number < len(answers):
                turns.append({"role": "assistant", "content": answers[number]})
        return turns

    def _stream(self, opened: LoadedModel, turns: list[dict[str, str]]) -> str:
        pieces: list[str] = []

        def write(text: str) -> None:
            pieces.append(text)
            to_stdout(text, end="")

        try:
            generate_text(opened, turns, replace(self.options, seed=self._seed), write)
        except signals.Interrupted:
            raise
        except KeyboardInterrupt:
            to_stderr(" (ended)")
        print(flush=True)
        return "".join(pieces).strip()

    def _save(self, file: Path | None) -> None:
        if file is None or file.exists():
            raise RecipeError("/save takes the name of a file that is not there yet.")
        lines = [
            json.dumps({"messages": self._turns(self._asked, answers)}, ensure_ascii=False)
            for answers in self._answers.values()
        ]
        with RecipeError.explaining(f"{file} cannot be written", "", OSError):
            atomic_files.write_text(file, "\n".join(lines) + "\n")
        print(f"Written: {file}")


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)
