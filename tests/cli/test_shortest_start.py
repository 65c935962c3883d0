"""`finetune`, `finetune train` and `finetune sft`: a launch file is chosen, and a recipe made, without asking."""

import csv
import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import testdata
from chats import CHATML
from harness import environment, run
from transformers import AutoTokenizer

from finetune.cli import choose_launch, main, new_project
from finetune.cli.choose_launch import choose_for_command, sharing
from finetune.cli.new_project import Project, make_recipe, write_project
from finetune.config.recipe import load_recipe, validate_recipe
from finetune.data.source_survey import UnknownColumns
from finetune.distributed.gpu_specs import Gpu
from finetune.planning.step_time import Machines
from finetune.utils.errors import DataError, RecipeError

SMALL: dict[str, Any] = {
    "model": {"config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
    "tokenizer": {"vocab_size": 512},
    "data": {"train": [{"sample": 100}], "sequence_length": 128},
    "batch": {"global_size": 16, "micro_size": 8},
    "length": {"epochs": 1},
}


def machine(gpus: int, gib: float = 79.0) -> Machines:
    return Machines(Gpu("a GPU", "", gib, 989.0, 450.0, 700.0), gpus, 1, 50.0, 0.4)


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> Callable[[Machines], None]:
    def use(machines: Machines) -> None:
        for module in (choose_launch, new_project):
            monkeypatch.setattr(module, "this_machine", lambda: machines)

    return use


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> str:
    """300 questions and answers as a spreadsheet saves them in much of Europe."""
    lines = (testdata.CONVERSATIONS / "questions.jsonl").read_text().splitlines()
    path = tmp_path_factory.mktemp("data") / "faq.csv"
    with open(path, "w", newline="", encoding="utf-8-sig") as file:
        writer = csv.writer(file, delimiter=";")
        writer.writerow(["Question", "Answer"])
        writer.writerows([pair["question"], pair["answer"]] for pair in map(json.loads, lines[:300]))
    return str(path)


def test_the_command_alone_shows_examples(capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main([]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    parser = main.build_parser()
    for line in lines[:4]:
        parser.parse_args(line.partition("   ")[0].split()[1:])


@pytest.mark.parametrize(
    ("gpus", "options", "name", "processes", "differs"),
    [
        (1, {}, "single", 1, False),
        (2, {}, "ddp", 2, False),
        (4, {}, "ddp", 4, True),
        (6, {}, "ddp", 4, True),
        (2, {"num_processes": "8"}, "ddp", 8, True),
    ],
)
@pytest.mark.parametrize("custom", [False, True])
def test_the_launch_that_fits(
    custom: bool,
    gpus: int,
    options: dict[str, str],
    name: str,
    processes: int,
    differs: bool,
    on: Callable[[Machines], None],
) -> None:
    on(machine(gpus))
    task = {"task": {"name": "own_task:mlp"}, "batch": SMALL["batch"], "length": {"steps": 1}}
    choice = choose_for_command(validate_recipe(task if custom else SMALL), options)
    assert (choice.name, choice.num_processes, choice.differs) == (name, processes, differs)
    # Micro-batches take what divides by themselves.
    assert choice.changes == ()


@pytest.mark.parametrize("name", ["sequence_classification", "token_classification", "regression"])
def test_data_is_not_read_to_choose(name: str, on: Callable[[Machines], None]) -> None:
    """A plan needs the number of classes, which only the data tells where the recipe does not."""
    on(machine(1))
    recipe = validate_recipe({**SMALL, "task": name, "data": {**SMALL["data"], "packing": "padded"}})
    assert choose_for_command(recipe, {}).name == "single"


def test_processes_share_a_batch() -> None:
    assert [sharing(machine(8), rows).gpus for rows in (1, 2, 6, 7, 12, 16)] == [1, 2, 6, 7, 6, 8]


@pytest.mark.parametrize(
    ("gib", "options", "says"),
    [
        (0.01, {}, r"On this machine \(1 x 0 GiB\) nothing fits"),
        (79.0, {"machine_rank": "1"}, "--machine_rank is for a run on several machines"),
        (79.0, {"num_processes": "none"}, "--num_processes takes a whole number from 1"),
    ],
)
def test_where_nothing_can_be_chosen(
    gib: float, options: dict[str, str], says: str, on: Callable[[Machines], None]
) -> None:
    on(machine(1, gib))
    with pytest.raises(RecipeError, match=says):
        choose_for_command(validate_recipe(SMALL), options)


def test_what_is_learned_is_not_changed_unasked(on: Callable[[Machines], None]) -> None:
    on(machine(1, 1.25))
    wide = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    # Which offloading is not offered for.
    optim = {"name": "SGD", "args": {"momentum": 0.9}}
    recipe = validate_recipe({**SMALL, "model": {"config": SMALL["model"]["config"] | wide}, "optim": optim})
    with pytest.raises(RecipeError, match=r"learns something else \(lora.rank=16\)") as caught:
        choose_for_command(recipe, {})
    assert "add model.gradient_checkpointing=true lora.rank=16 to the command" in str(caught.value)


def test_train_starts_what_it_has_chosen(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], on: Callable[[Machines], None]
) -> None:
    started: list[Any] = []
    monkeypatch.setattr(
        "finetune.distributed.launch.launcher.launch_workers", lambda *given, **_: started.append(given)
    )
    on(machine(4))
    assert main.main(["train", "sample", "optim.lr=1e-3"]) == 0
    ((file, options, words),) = started
    assert Path(file).stem == "ddp"
    assert options == ["--num_processes", "4"]
    assert words[1:] == ["optim.lr=1e-3"]
    said = capsys.readouterr().out
    assert said.startswith("ddp on 4 processes: the simplest for several processes: each holds")
    assert "GPU" not in said  # there may be none
    assert main.main(["train", "--config_file", "single", "--quiet", "sample"]) == 0
    file, options, words = started[1]
    assert (Path(file).stem, options, words[0], words[2:]) == ("single", [], "--quiet", [])
    assert capsys.readouterr().out == ""


def test_a_recipe_is_made_once(questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project = Project(model=testdata.MODEL, data=questions, adapters="lora")
    made = make_recipe(project, ["optim.lr=1e-3"])
    assert made.file == Path("runs/llama-faq-lora/sft.yaml")
    assert not made.file.parent.exists()
    recipe = made.recipe
    assert recipe.chat is not None
    assert recipe.chat.template == "plain"
    assert recipe.data.train[0].fields == {"user": "Question", "assistant": "Answer"}
    assert (recipe.optim.lr, recipe.output.dir) == (1e-3, "runs/llama-faq-lora")
    assert "300 conversations" in made.lines[0]
    assert not any("sft.yaml" in line for line in made.lines)
    made.file.parent.mkdir(parents=True)
    edited = made.text.replace("epochs: ", "epochs: 1")
    made.file.write_text(edited)
    assert make_recipe(project, ["optim.lr=1e-3"]).text == edited
    with pytest.raises(RecipeError, match="is the recipe of another command"):
        make_recipe(project, [])
    assert make_recipe(project, ["output.dir=elsewhere"]).file == Path("elsewhere/sft.yaml")


_TICKETS = [{"Nr": n, "Betreff": f"Ticket {n}", "Team 2": "ab"[n % 2]} for n in range(40)]


@pytest.mark.parametrize(
    ("records", "more", "kind"),
    [
        ([{"Frage": f"Was ist {n}?", "Antwort": f"{n}, eine Zahl."} for n in range(40)], [], "chat"),
        ([{"Frage": "Was?", "Antwort": "Das."}], ["--task", "chat", "optim.lr=1e-3", "--output", "my runs"], "chat"),
        (_TICKETS, [], "sequence_classification"),
        (_TICKETS, ["data.train.0.text_field=Betreff", "--task", "classify"], "sequence_classification"),
    ],
)
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_columns_without_a_known_name_end_in_a_command_to_paste(
    suffix: str,
    records: list[dict[str, Any]],
    more: list[str],
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    with open(f"a b.{suffix}", "w", newline="") as file:
        table = csv.DictWriter(file, records[0], delimiter=";")
        if suffix == "csv":
            table.writeheader()
            table.writerows(records)
        else:
            file.writelines(json.dumps(record) + "\n" for record in records)
    if kind != "chat" and not more:  # a text and a class need no name of the text, but of the class
        more = ["--task", "classify"]
    assert main.main(["sft", "--model", testdata.MODEL, "--data", f"a b.{suffix}", *more]) == 2
    said = capsys.readouterr().err
    assert f"the fields are {', '.join(records[0])}, and by their names these are no" in said
    command = said.splitlines()[-1].strip()
    assert command.startswith(f"finetune sft --model {testdata.MODEL} --data 'a b.{suffix}' ")
    started: list[Any] = []
    monkeypatch.setattr("finetune.cli.recipe_verbs._start", started.append)
    assert main.main([*shlex.split(command)[1:], "--config_file", "single"]) == 0
    recipe = load_recipe(started[0].recipe)
    assert ("chat" if recipe.chat is not None else recipe.task.name) == kind
    assert main.main(["init", "new", "--data", f"a b.{suffix}", *(more[:2] if more[:1] == ["--task"] else [])]) in (
        0,
        2,
    )
    assert "data.train" not in capsys.readouterr().err


def test_columns_can_be_given(tmp_path: Path) -> None:
    data = tmp_path / "a.jsonl"
    data.write_text('{"Frage": "a", "Antwort": "b", "Art": "c"}\n' * 50)
    project = Project(model=testdata.MODEL, data=str(data))
    with pytest.raises(UnknownColumns, match=r"the fields are Frage, Antwort, Art"):
        make_recipe(project, [])
    chat = ["data.train.0.fields.user=Frage", "data.train.0.fields.assistant=Antwort"]
    assert make_recipe(project, chat).recipe.chat is not None
    recipe = make_recipe(project, ["data.train.0.text_field=Frage", "data.train.0.label_field=Art"]).recipe
    assert (recipe.task.name, recipe.data.train[0].path) == ("sequence_classification", str(data))


TURN = [{"role": "assistant", "content": "Nora."}]


@pytest.mark.parametrize(
    ("record", "fields", "chat"),
    [
        ({"prompt": "Who is {n}?", "chosen": "Nora.", "rejected": "It is {n}."}, {}, True),
        ({"chosen": "Q: Who is {n}? A: Nora.", "rejected": "Q: Who is {n}? A: It."}, {}, False),
        (
            {
                "prompt": [{"role": "user", "content": "{n}?"}],
                "chosen": TURN,
                "rejected": [TURN[0] | {"content": "It."}],
            },
            {},
            True,
        ),
        (
            {"Query": "Who is {n}?", "chosen_response": "Nora.", "rejected_response": "It is {n}."},
            {"prompt": "Query", "chosen": "chosen_response", "rejected": "rejected_response"},
            True,
        ),
        ({"prompt": "Who is {n}?", "completions": ["Nora.", "It."], "scores": [2, 1]}, {}, True),
    ],
)
def test_columns_of_pairs(
    record: dict[str, Any], fields: dict[str, str], chat: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    lines = [json.dumps(record).replace("{n}", str(n)) for n in range(200)]
    Path("pairs.jsonl").write_text("\n".join([*lines, lines[0].replace("Nora.", "Nora. " * 500)]))
    made = make_recipe(Project("dpo", testdata.MODEL, "pairs.jsonl", "lora"), ["task.name=simpo"])
    assert made.lines[0].startswith("Found in pairs.jsonl: 201 pairs of answers")
    # The longest one is left out, and said to be if there are more.
    assert made.recipe.data.sequence_length == 64
    assert (made.file, made.recipe.task.name) == (Path("runs/llama-pairs-lora/dpo.yaml"), "simpo")
    assert made.text.startswith(f"# finetune dpo --model {testdata.MODEL} --data pairs.jsonl --lora task.name=simpo\n")
    assert (made.recipe.data.train[0].fields, made.recipe.chat is not None) == (fields, chat)
    assert made.recipe.optim.lr == 5e-6
    if "chosen" in record:
        with pytest.raises(DataError, match=r"preferences .* which `finetune dpo` learns"):
            make_recipe(Project(model=testdata.MODEL, data="pairs.jsonl"), [])
        alone = ["data.train.0.fields.user=prompt", "data.train.0.fields.assistant=chosen"]
        if isinstance(record.get("prompt"), str):
            assert make_recipe(Project(model=testdata.MODEL, data="pairs.jsonl"), alone).recipe.task.name == "causal_lm"


@pytest.mark.parametrize("how", [["--task", "kto"], ["task.name=kto"]], ids=["option", "key"])
def test_answers_with_labels(
    how: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    records = [{"prompt": f"Who is {n}?", "completion": "Nora.", "label": not n % 3} for n in range(60)]
    Path("answers.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    started: list[Any] = []
    monkeypatch.setattr("finetune.cli.recipe_verbs._start", started.append)
    words = ["dpo", "--model", testdata.MODEL, "--data", "answers.jsonl", "--lora", "--config_file", "single"]
    assert main.main([*words, *how]) == 0
    assert "answers.jsonl: 60 answers with a label" in capsys.readouterr().out
    recipe = load_recipe(started[0].recipe)
    assert (recipe.task.name, recipe.data.packing, recipe.optim.lr) == ("kto", "documents", 5e-6)
    assert main.main([*words, "--output", "runs/pairs"]) == 2
    assert "answers.jsonl holds answers with a label, and dpo learns pairs" in capsys.readouterr().err


def test_a_reward_model_is_a_key_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"prompt": "Who?", "chosen": "Nora.", "rejected": "It."}
    Path("pairs.jsonl").write_text(f"{json.dumps(record)}\n" * 60)
    made = make_recipe(Project("dpo", testdata.MODEL, "pairs.jsonl", "lora"), ["task.name=reward"])
    assert (made.recipe.task.name, made.recipe.data.packing, made.recipe.optim.lr) == ("reward", "padded", 1e-4)
    assert made.recipe.preference is not None
    assert made.recipe.preference.centering == 0.01


def test_columns_of_pairs_without_a_known_name_end_in_a_command_to_paste(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    record = {"Frage": "Wer?", "gut": "Nora.", "schlecht": "Sie."}
    Path("a.jsonl").write_text(f"{json.dumps(record)}\n" * 40)
    assert main.main(["dpo", "--model", testdata.MODEL, "--data", "a.jsonl"]) == 2
    said = capsys.readouterr().err
    assert (
        "by their names these are no pairs of answers. Name them behind the command: data.train.0.fields.prompt="
        in said
    )
    started: list[Any] = []
    monkeypatch.setattr("finetune.cli.recipe_verbs._start", started.append)
    assert main.main([*shlex.split(said.splitlines()[-1])[1:], "--config_file", "single"]) == 0
    recipe = load_recipe(started[0].recipe)
    assert recipe.data.train[0].fields == {"prompt": "Frage", "chosen": "gut", "rejected": "schlecht"}
    assert (Path("runs/llama-a/dpo.yaml").is_file(), recipe.task.name) == (True, "dpo")


def test_the_models_own_template_and_classes(questions: str, tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    for file in Path(testdata.MODEL).iterdir():
        (model / file.name).symlink_to(file)
    (model / "tokenizer_config.json").unlink()
    tokenizer = AutoTokenizer.from_pretrained(testdata.MODEL)
    tokenizer.chat_template = CHATML
    (tmp_path / "tokenizer").mkdir()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    for file in (tmp_path / "tokenizer").iterdir():
        (model / file.name).unlink(missing_ok=True)
        (model / file.name).symlink_to(file)
    recipe = make_recipe(Project(model=str(model), data=questions), []).recipe
    assert recipe.chat is not None
    assert recipe.chat.template is None
    reviews = tmp_path / "reviews.jsonl"
    labels = ["good"] * 7 + ["bad", "mixed"]
    reviews.write_text("".join(json.dumps({"Review": f"It is {n}.", "label": labels[n % 9]}) + "\n" for n in range(90)))
    made = make_recipe(Project(model=str(model), data=str(reviews)), [])
    assert made.lines[1].startswith("Class good has 70 documents, and bad 10: with task.class_weights=balanced")
    # A run's model lies in its folder `model`.
    assert made.file == Path("runs") / f"{tmp_path.name}-reviews" / "sft.yaml"
    recipe = made.recipe
    assert (recipe.task.name, recipe.task.num_labels) == ("sequence_classification", 3)
    assert recipe.data.train[0].text_field == "Review"


def test_an_override_of_sft_replaces_the_key_that_it_excludes(
    questions: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    typed = ["length.steps=20", "sample.prompt=one\n  two"]
    made = make_recipe(Project(model=testdata.MODEL, data=questions), typed)
    assert made.recipe.length.model_dump(exclude_none=True) == {"steps": 20}
    assert re.fullmatch(
        r"length\.steps=20 replaces length\.epochs: \d+ of the recipe that is made\n", capsys.readouterr().err
    )
    made.file.parent.mkdir(parents=True)
    made.file.write_text(made.text)
    # Its first line is the command, whatever its words hold.
    assert make_recipe(Project(model=testdata.MODEL, data=questions), typed).recipe == made.recipe


def test_init_shows_what_it_wrote(questions: str, tmp_path: Path) -> None:
    lines = write_project(tmp_path / "faq", Project(data=questions))
    assert lines[1] == f"Written to {tmp_path / 'faq'}"
    assert {"├── README.md", "├── accelerate_configs", "│   ├── ddp.yaml", "└── recipe.yaml"} <= {*lines}
    assert load_recipe(tmp_path / "faq" / "recipe.yaml").chat is not None


def test_nothing_is_left_where_sft_is_refused(
    tmp_path: Path, questions: str, monkeypatch: pytest.MonkeyPatch, on: Callable[[Machines], None]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RecipeError, match=r"^length\.steps=20 and length\.tokens=9 exclude each other"):
        make_recipe(Project(model=testdata.MODEL, data=questions), ["length.steps=20", "length.tokens=9"])
    on(machine(1, 0.01))
    assert main.main(["sft", "--model", testdata.MODEL, "--data", questions]) == 2
    assert main.main(["sft", "--model", testdata.MODEL, "--data", "nothing.csv"]) == 2
    assert not list(tmp_path.iterdir())


def _finetune(python: str, folder: Path, *words: str) -> str:
    code, output = run([python, "-m", "finetune", *words], cwd=folder, env=environment())
    assert code == 0, output[-3000:]
    return output


def test_questions_in_a_spreadsheet_become_a_chat_model(questions: str, tmp_path: Path, quick_python: str) -> None:
    words = ("sft", "--model", testdata.MODEL, "--data", questions, "--lora", "--output", "runs/faq")
    dry = _finetune(quick_python, tmp_path, *words, "--dry-run")
    assert "adapters   LoRA of rank 16" in dry
    # Small batches, read several times, which eight processes can share: 300 pairs are trained on for some fifty steps.
    assert "batch      8 rows" in dry
    assert "length     5.0 epochs" in dry
    assert not (tmp_path / "runs").exists()
    assert "sft.yaml" not in dry
    assert "finetune" not in dry
    words = (*words, "length={steps: 8}")
    said = _finetune(quick_python, tmp_path, *words)
    assert "300 conversations (pairs)" in said
    assert "left out as too long" not in said
    assert "only" not in said
    steps = json.loads((tmp_path / "runs/faq/metrics.jsonl").read_text().splitlines()[-1])["step"]
    assert steps == 8
    assert (tmp_path / "runs/faq/model/adapter_config.json").is_file()
    assert (
        "Recipe: runs/faq/sft.yaml. To change it, edit it and run `finetune train runs/faq/sft.yaml output.dir=" in said
    )
    *_, lead, chat, evaluation, export = said.rstrip().splitlines()
    assert (lead, chat, evaluation) == ("Next:", "  finetune chat runs/faq", "  finetune eval runs/faq --data FILE")
    main.build_parser().parse_args(shlex.split(export, comments=True)[1:])
    again = _finetune(quick_python, tmp_path, *words)
    assert "as it is there" in again
    assert "Nothing is left to do" in again


def test_a_tree_of_parquet_becomes_a_corpus(tmp_path: Path, quick_python: str) -> None:
    texts = [json.loads(line)["text"] for line in Path(testdata.stories("train")[0]["path"]).read_text().splitlines()]
    for number in range(4):
        folder = tmp_path / "corpus" / f"part-{number % 2}" / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table({"content": texts[number * 100 : (number + 1) * 100], "id": list(range(100))})
        pyarrow.parquet.write_table(table, folder / f"{number}.parquet")
    (tmp_path / "corpus" / "README.md").write_text("# Stories")
    said = _finetune(quick_python, tmp_path, "sft", "--model", testdata.MODEL, "--data", "corpus", "length={steps: 2}")
    assert "corpus: 400 texts, with text_field content" in said
    assert "not read: README.md" in said
    facts = json.loads((tmp_path / "runs/llama-corpus/run.json").read_text())
    assert facts["data"]["train"]["documents"] + facts["data"]["validation"]["documents"] == 400
    assert (tmp_path / "runs/llama-corpus/model").is_dir()


def test_labelled_texts_become_a_classifier(tmp_path: Path, quick_python: str) -> None:
    places = ("tests", "docs", "code", "code")
    records = [{"review": f"Number {n} of {places[n % 4]}.", "label": places[n % 4]} for n in range(120)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    said = _finetune(quick_python, tmp_path, "sft", "--model", testdata.MODEL, "--data", "a.jsonl", "length={steps: 2}")
    assert "120 texts with a class of 3, with text_field review" in said
    config = json.loads((tmp_path / "runs/llama-a/model/config.json").read_text())
    assert config["id2label"] == {"0": "code", "1": "docs", "2": "tests"}
