"""`finetune report`: the page in a browser, the pictures, and what is refused."""

import dataclasses
import html
import json
import os
import re
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium import Page, chromium, needs_chromium
from inside import Crash, at_step, copy, crash_after, mlp, run_here
from plotly.offline import get_plotlyjs
from testdata import MODEL

from finetune.checkpoint.run_history import read_run
from finetune.data.synthetic import story_generator
from finetune.diagnostics.run_report import charts, page, run_summary, write_and_serve
from finetune.diagnostics.run_report.charts import MOST_POINTS, downsample_curve, running_mean
from finetune.diagnostics.run_report.page import differing_keys
from finetune.diagnostics.run_report.write_and_serve import LiveServer, is_own_host
from finetune.utils.errors import CheckpointError, RecipeError

EVIL = "<script>window.spoiled = 1</script><img src=x onerror='window.spoiled = 2'></script>"


def add_line(run: Path, **line: Any) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a skipped step, a restart, evaluations, and a sample."""
    os.environ["TROUBLE"] = json.dumps({"loss": {"17": "nan"}})
    try:
        tree = mlp(
            tmp_path_factory.mktemp("report") / "one",
            task={"name": "troubled_task:mlp"},
            eval={"every_steps": 5},
            guard={"max_skipped_steps": 5},
            optim={"lr": 2e-4},
        )
        with pytest.raises(Crash):
            run_here(tree, crash_after(7))
        done = run_here(tree)
    finally:
        del os.environ["TROUBLE"]
    add_line(done.directory, step=20, sample=f"Once {EVIL}")
    return done.directory


@pytest.fixture(scope="module")
def sampled(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with samples of two machines."""
    run = copy(finished, tmp_path_factory.mktemp("sampled") / "run")
    gpu = {"percent": 97, "temperature_c": 71, "power_w": 640.5, "sm_clock_mhz": 1755, "throttled": ["power cap"]}
    with (run / "machines.jsonl").open("w") as file:
        for number in range(3):
            figures = {"cpu_percent": 50.0 + number, "memory_used_gib": 12.5, "memory_total_gib": 64.0}
            sample = {"step": number, "time": 1000.0 + 60 * number, "machine": 0, "host": EVIL, **figures}
            file.write(json.dumps({**sample, "gpus": [gpu]}) + "\n")
            file.write(json.dumps({**sample, "machine": 1, "host": "node1", "sent_mib_s": 3.0}) + "\n")
    return run


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run on conversations, with samples, and its page as it was while the run went."""
    folder = tmp_path_factory.mktemp("talking")
    asked = [f"{EVIL} What is {number}? {'Say it. ' * 100 * (number == 1)}" for number in range(8)]
    pairs = [{"prompt": question, "completion": f"It is {number}."} for number, question in enumerate(asked)]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    tree = {
        "model": {"name": MODEL},
        "chat": {"template": "plain"},
        "data": {
            "train": [{"path": str(folder / "pairs.jsonl")}],
            "packing": "padded",
            "sequence_length": 512,
            "cache_dir": str(folder / "cache"),
        },
        "batch": {"global_size": 4, "micro_size": 4},
        "length": {"steps": 4},
        "log": {"every_steps": 1},
        "sample": {"prompt": "Once", "max_new_tokens": 4, "every_steps": 1},
        "output": {"dir": str(folder / "run")},
        "precision": "fp32",
    }
    page = folder / "running.html"
    done = run_here(tree, at_step(3, lambda run: write_and_serve.write_report([folder / "run"], page)))
    return done.directory, page


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Another recipe, in another folder of the same name."""
    tree = mlp(tmp_path_factory.mktemp("report") / "one", optim={"lr": 3e-2}, eval={"every_steps": 5})
    return run_here(tree).directory


@pytest.fixture(scope="module")
def browser() -> Iterator[Page]:
    with chromium() as found:
        yield found


def written(tmp_path: Path, *runs: Path, **options: Any) -> Path:
    return write_and_serve.write_report(list(runs), tmp_path / "page.html", **options)[0]


def data_of(file: Path) -> dict[str, Any]:
    text = file.read_text(encoding="utf-8").split('<script id="report-data" type="application/json">')[1]
    return json.loads(text.split("</script>")[0])


# ---------------------------------------------------------------- in a browser


@needs_chromium
@pytest.mark.parametrize(("width", "theme"), [(1280, "light"), (390, "dark")])
def test_a_run_in_a_browser(finished: Path, tmp_path: Path, browser: Page, width: int, theme: str) -> None:
    shown = browser.open(written(tmp_path, finished, price=2.5), width=width, theme=theme)
    assert shown.traces() == {
        "loss": 2,
        "learning-rate": 1,
        "gradient-norm": 3,
        "throughput": 1,
        "step-time": 4,
        "memory": 1,
    }
    assert shown.overflow() == 0
    assert shown.cut_labels() == []
    assert "training loss" in (told := shown.hover("loss")), told
    assert any(f"{loss:.5g}" in told for loss in read_run(finished).training["loss"]), told
    assert shown.js("return performance.getEntriesByType('resource').length") == 0
    assert shown.js("return window.spoiled") is None
    assert shown.console() == []


@needs_chromium
@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_machines_in_a_browser(sampled: Path, tmp_path: Path, browser: Page, width: int, theme: str) -> None:
    shown = browser.open(written(tmp_path, sampled), width=width, theme=theme)
    assert {key: count for key, count in shown.traces().items() if key.startswith("machine")} == {
        "machine-cpu": 2,
        "machine-memory": 2,
        "machine-network": 1,
        "machine-gpu": 1,
        "machine-gpu-temperature": 1,
        "machine-gpu-clock": 1,
        "machine-gpu-power": 1,
    }
    rows = "[...document.querySelectorAll('#machines tbody tr')].map((row) => row.textContent)"
    first, second = shown.js(f"return {rows}")
    assert first == f"0{EVIL}51 %12.5 of 64 GiB––––––97 %–71 °C640 W"
    assert second == "1node151 %12.5 of 64 GiB––3 MiB/s–––––––"
    said = shown.js("return document.querySelector('#machines ul').textContent")
    assert said == f"Machine 0 {EVIL}: the clock of a GPU was held back in 100% of the samples (power cap)."
    assert shown.violations() == []
    assert shown.overflow() == 0
    assert shown.unreachable() == []
    assert shown.js("return window.spoiled") is None
    assert shown.console() == []
    assert not list(tmp_path.glob("*machine*.png"))
    # Over their own axis, whatever the others are over.
    shown.click('[data-axis="tokens"]')
    chart = "document.querySelector('[data-chart=machine-cpu]')"
    assert shown.js(f"return [...{chart}.data[0].x]") == [0, 60, 120]
    assert shown.js(f"return {chart}.querySelector('.xtitle').textContent") == "time since the first sample (s)"


@needs_chromium
# Contrast depends on the theme, and overflow and reach on the width: two pairs have all of both.
@pytest.mark.parametrize(("width", "theme"), [(1280, "dark"), (390, "light")])
def test_everybody_can_use_the_page(
    talking: tuple[Path, Path], finished: Path, tmp_path: Path, browser: Page, width: int, theme: str
) -> None:
    run, running = talking
    files = [written(tmp_path / "one", run), running, written(tmp_path / "many", run, finished)]
    for file in [*files, written(tmp_path / "troubled", finished)]:
        shown = browser.open(file, width=width, theme=theme)
        assert shown.violations() == [], file
        assert shown.overflow() == 0, file
        assert shown.unreachable() == [], file
        assert shown.console() == [], file


@needs_chromium
def test_checks_of_a_page_can_fail(finished: Path, tmp_path: Path, browser: Page) -> None:
    shown = browser.open(written(tmp_path, finished), width=390)
    shown.js("document.querySelector('main').insertAdjacentHTML('beforeend', '<img src=\"data:,\">')")
    assert "image-alt: ['img']" in shown.violations()
    shown.js("document.querySelector('#theme').tabIndex = -1")
    assert any('id="theme"' in one for one in shown.unreachable())


@needs_chromium
def test_keys(finished: Path, tmp_path: Path, browser: Page) -> None:
    shown = browser.open(written(tmp_path, finished), width=390)
    shown.js("document.querySelector('[data-axis=tokens]').focus()")
    shown.press(" ")
    assert shown.js("return document.querySelector('[data-chart=loss]').data[0].x.at(-1)") == 160
    shown.js("document.querySelector('#checkpoints summary').focus()")
    shown.press("\ue007")  # enter
    assert shown.js("return document.querySelector('#checkpoints').open")
    wide = "document.querySelector('#launch .scroll')"
    shown.js(f"{wide}.focus()")
    shown.press("\ue014")  # the right arrow
    shown.wait(f"return {wide}.scrollLeft > 0")


@needs_chromium
def test_dark_and_light(finished: Path, tmp_path: Path, browser: Page) -> None:
    colors = (
        "return [getComputedStyle(document.body).backgroundColor, "
        "document.querySelector('[data-chart=loss] .xtick text').style.fill]"
    )
    file = written(tmp_path, finished)
    light = browser.open(file, theme="light").js(colors)
    browser.js("localStorage.clear()")
    dark = browser.open(file, theme="dark").js(colors)
    assert all(one != two for one, two in zip(light, dark, strict=True)), (light, dark)
    browser.click("#theme")
    assert browser.js(colors) == light
    # The choice stays.
    assert browser.open(file, theme="dark").js(colors) == light
    browser.js("localStorage.clear()")


@needs_chromium
def test_buttons(finished: Path, tmp_path: Path, browser: Page) -> None:
    shown = browser.open(written(tmp_path, finished))
    last = "return document.querySelector('[data-chart=loss]').data[0].x.at(-1)"
    run = read_run(finished)
    assert shown.js(last) == 20
    shown.click('[data-axis="tokens"]')
    assert shown.js(last) == run.training["tokens"][-1]
    shown.click('[data-axis="time"]')
    assert shown.js(last) == pytest.approx(run.training_seconds[-1], rel=1e-4)
    shown.click('[data-log="loss"]')
    assert shown.js("return document.querySelector('[data-chart=loss]').layout.yaxis.type") == "log"
    assert shown.console() == []


@needs_chromium
@pytest.mark.parametrize("width", [1280, 390])
def test_several_runs_in_a_browser(finished: Path, other: Path, tmp_path: Path, browser: Page, width: int) -> None:
    shown = browser.open(written(tmp_path, finished, other), width=width)
    assert set(shown.traces().values()) == {2}
    legend = shown.js("return document.querySelector('[data-chart=loss] .legend').textContent")
    assert str(finished) in legend
    assert str(other) in legend
    keys = "[...document.querySelectorAll('#differences tbody th')]"
    differing = shown.js(f"return {keys}.map((key) => key.textContent)")
    assert "optim.lr" in differing
    assert "output.dir" not in differing
    assert "seed" not in differing
    # No name of a key is broken into lines.
    lines = "const r = new Range(), lines = (node) => (r.selectNodeContents(node), r.getClientRects().length); "
    assert shown.js(f"{lines} return {keys}.filter((key) => lines(key) > 1).map((key) => key.textContent)") == []
    assert shown.overflow() == 0
    if width == 1280:  # all columns are in view, however long a run's name is
        wide = "[...document.querySelectorAll('main > .card .scroll')].map((box) => box.scrollWidth - box.clientWidth)"
        assert shown.js(f"return {wide}") == [0]
    assert shown.js("return window.spoiled") is None
    assert shown.console() == []


def test_curves_that_lie_on_each_other_show_their_difference(finished: Path, other: Path, tmp_path: Path) -> None:
    near = copy(finished, tmp_path / "near")
    lines = [json.loads(line) for line in (near / "metrics.jsonl").read_text().splitlines()]
    for line in lines:
        for key in ("loss", "validation_loss"):
            if isinstance(line.get(key), float):
                line[key] *= 1 + 1e-6 * (line["step"] % 3)
    (near / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [(name, read_run(place)) for name, place in (("one", finished), ("near", near), ("far", other))]
    shown = {chart.key: chart for chart in charts.charts_of(runs)}
    for key in ("loss-difference", "validation-loss-difference"):
        assert shown[key].title.endswith("loss: difference to one")
        (curve,) = shown[key].curves
        assert curve.name == "near"
        away = [1e-6 * (step % 3) for step in curve.steps]
        assert curve.y == pytest.approx(away, abs=1e-12)
    assert 14 not in shown["loss-difference"].curves[0].steps, "its loss is no number"
    assert not {"loss-difference", "validation-loss-difference"} & {c.key for c in charts.charts_of(runs[::2])}


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ({"a": 1.5, "b": 1.4}, "b has the lowest validation loss, 1.4"),
        ({"a": 1.40001, "b": 1.4}, "a and b have the same validation loss, 1.4"),
        ({"a": 1.40001, "b": 1.4, "c": 1.4001}, "a, b and c have the same validation loss, 1.4"),
        ({"a": 1.40001, "b": 1.5, "c": 1.4}, "a and c have the lowest validation loss, 1.4"),
        ({"a": 1.4}, ""),
        ({}, ""),
    ],
)
def test_a_tie_is_told(losses: dict[str, float], says: str) -> None:
    assert page._winner(losses) == says


@needs_chromium
def test_a_live_page_refreshes(
    finished: Path, tmp_path: Path, browser: Page, served: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = copy(finished, tmp_path / "run")
    monkeypatch.setattr(write_and_serve, "REFRESH_S", 0.2)
    server = served(run)
    shown = browser.open(server.url)
    points = "return document.querySelector('[data-chart=loss]').data[0].x.length"
    assert shown.js(points) == 20
    shown.click('[data-axis="tokens"]')
    shown.js("document.querySelector('#checkpoints summary').focus()")
    add_line(run, step=21, loss=0.5, grad_norm=1.0, tokens=168, step_s=0.1)
    add_line(run, step=21, sample=f"Twice {EVIL}")
    shown.wait(f"{points} === 21")
    assert shown.js("return document.querySelector('[data-chart=loss]').data[0].x.at(-1)") == 168
    assert shown.js("return document.querySelectorAll('[data-axis][aria-pressed=true]').length") == 1
    assert shown.js("return document.activeElement.parentElement.id") == "checkpoints"
    assert "Twice <script>" in shown.js("return document.querySelector('#samples').textContent")
    assert shown.js("return window.spoiled") is None
    assert shown.console() == []


# ---------------------------------------------------------------- the live server


@pytest.fixture
def served() -> Iterator[Any]:
    running: list[tuple[LiveServer, threading.Thread]] = []

    def serve(run: Path, **options: Any) -> LiveServer:
        server = LiveServer([run], **options)
        thread = threading.Thread(target=server.serve_forever, args=(0.2,))
        thread.start()
        running.append((server, thread))
        return server

    yield serve
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join(30)


def ask(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=30) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_who_may_read_a_live_page(finished: Path, served: Any) -> None:
    server = served(finished)
    root = f"http://127.0.0.1:{server.server_port}"
    assert server.server_address[0] == "127.0.0.1"
    assert len(server.token) >= 32
    assert ask(server.url) == ask(f"{server.url}data") == 200
    wrong = server.token[:-1] + ("a" if server.token[-1] != "a" else "b")
    for path in (
        "",
        "/",
        f"/{wrong}/",
        f"/{server.token[:-1]}/",
        f"/{server.token}/run.json",
        "/é/".replace("é", "%C3%A9"),
    ):
        assert ask(f"{root}{path}") == 404, path
    assert ask(f"{root}/{server.token}/../../etc/passwd") == 404
    assert ask(server.url, Host=f"evil.example:{server.server_port}") == 421
    assert ask(server.url, Host=f"127.0.0.1.evil.example:{server.server_port}") == 421
    assert ask(server.url, Host="localhost:9000") == 200
    request = urllib.request.Request(server.url, data=b"x", method="POST")
    with pytest.raises(urllib.error.HTTPError, match="501"):
        urllib.request.urlopen(request, timeout=30)


def test_which_hosts_are_own() -> None:
    for host in ("127.0.0.1", "127.0.0.1:80", "[::1]:80", "[::1]", "::1", "localhost", "LOCALHOST:1", "10.0.0.7:99"):
        assert is_own_host(host), host
    for host in (
        "",
        "evil.example",
        "evil.example:80",
        "localhost.evil.example",
        "127.0.0.1.nip.io",
        "[evil]:80",
        "evil@localhost",
    ):
        assert not is_own_host(host), host


def test_an_address_that_cannot_be_served(finished: Path, served: Any) -> None:
    server = served(finished)
    with pytest.raises(RecipeError, match=r"--live: cannot serve on 127\.0\.0\.1:"):
        LiveServer([finished], port=server.server_port)
    with pytest.raises(RecipeError, match="--port is 70000"):
        LiveServer([finished], port=70000)


def test_a_run_that_vanishes_is_said(finished: Path, tmp_path: Path, served: Any) -> None:
    run = copy(finished, tmp_path / "run")
    server = served(run)
    (run / "run.json").unlink()
    assert ask(f"{server.url}data") == 503


# ---------------------------------------------------------------- the data


def test_examples_of_the_data_and_samples(talking: tuple[Path, Path], tmp_path: Path) -> None:
    run, running = talking
    for file in (written(tmp_path, run), running):
        text = file.read_text(encoding="utf-8")
        examples = text.split('<section id="examples">')[1].split("</section>")[0]
        assert [title.split(":")[0] for title in re.findall(r"<h3>(.*?)</h3>", examples)] == [
            "example 1",
            "example 2",
            "example 3",
        ]
        learned = [html.unescape(mark).replace("|", "") for mark in re.findall("<mark>(.*?)</mark>", examples)]
        assert [part.strip() for part in learned] == ["It is 0.</s>", "It is 1.</s>", "It is 2.</s>"]
        assert len(re.findall("more tokens …", examples)) == 1
        assert "&lt;" in examples
        assert EVIL not in text
        samples = text.split('<section id="samples">')[1].split("</section>")[0]
        assert "Once" in samples


def test_examples_are_few_and_whole_or_absent(talking: tuple[Path, Path], finished: Path, tmp_path: Path) -> None:
    assert not (finished / "examples.json").exists(), "its rows are no tokens"
    assert 500 < (talking[0] / "examples.json").stat().st_size < 20_000
    run = copy(talking[0], tmp_path / "run")
    (run / "examples.json").write_text('[[{"text": 3}]]')
    with pytest.raises(CheckpointError, match=r"examples\.json cannot be read: item 1: item 1: text is a whole number"):
        written(tmp_path, run)
    (run / "examples.json").unlink()
    assert 'id="examples"' not in written(tmp_path, run).read_text(encoding="utf-8")


def test_pairs_are_shown_as_texts_and_their_figures_as_curves(tmp_path: Path) -> None:
    data = {"train": [{"sample": 12}], "validation": [{"sample": 4}], "cache_dir": str(tmp_path / "cache")}
    tree = {
        "task": {"name": "dpo"},
        "model": {"name": MODEL},
        "chat": {"template": "plain"},
        "data": {**data, "sequence_length": 512},
        "batch": {"global_size": 4, "micro_size": 4},
        "length": {"steps": 2},
        "log": {"every_steps": 1},
        "eval": {"every_steps": 1},
        "output": {"dir": str(tmp_path / "run")},
    }
    run = run_here(tree).directory
    shown = {chart.key: chart for chart in charts.charts_of([("one", read_run(run))])}
    for figure in ("margins", "accuracies"):
        curves = shown[f"rewards-{figure}"].curves
        assert [curve.name for curve in curves] == [f"rewards/{figure}", f"validation rewards/{figure}"]
        assert all(len(curve.y) == 2 for curve in curves)
        assert f"validation-rewards-{figure}" not in shown
    text = written(tmp_path, run).read_text(encoding="utf-8")
    examples = html.unescape(text.split('<section id="examples">')[1].split("</section>")[0])
    titles = [title.split(":")[0] for title in re.findall(r"<h3>(.*?)</h3>", examples)]
    assert titles == [f"example {n}, {name}" for n in (1, 2, 3) for name in ("prompt", "chosen", "rejected")]
    first = next(story_generator.preferences(1))
    prompt, *answers = re.findall("<blockquote>(.*?)</blockquote>", examples, re.DOTALL)[:3]
    assert first.prompt[0]["content"][:40] in prompt
    for answer, (wanted,) in zip(answers, (first.chosen, first.rejected), strict=True):
        assert answer == f"<mark>{answer[6:-7]}</mark>"
        assert wanted["content"].endswith(answer[6:-7].strip().removesuffix("</s>"))
    assert "length alone predicts" in text


# ---------------------------------------------------------------- files


def test_files_beside_the_page(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    files = write_and_serve.write_report([run])
    assert files[0] == run / "report" / "report.html"
    assert {file.name for file in files[1:]} >= {"report-loss.png", "report-gradient-norm.png", "report-step-time.png"}
    for file in files[1:]:
        assert file.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
        assert file.stat().st_size > 5_000
    # Again: a report is replaced.
    assert write_and_serve.write_report([run]) == files


def test_files_of_several_runs_go_into_a_folder_of_their_own(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [copy(finished, tmp_path / "runs" / name) for name in ("a", "b", "c", "d", "e")]
    monkeypatch.chdir(tmp_path)
    files = write_and_serve.write_report(runs[:2])
    assert files[0] == Path("report-a-b/report.html")
    assert {file.parent for file in files} == {Path("report-a-b")}
    write_and_serve.write_report(runs)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report-a-b", "report-a-b-c-2-more", "runs"]


def test_text_of_a_run_is_only_text(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    facts = json.loads((run / "run.json").read_text())
    facts |= {"git_commit": EVIL, "command": [EVIL], "precision": EVIL}
    facts["starts"][0]["host"] = EVIL
    facts["runs"]["wrapper"] = EVIL
    (run / "run.json").write_text(json.dumps(facts))
    (run / "recipe.yaml").write_text((run / "recipe.yaml").read_text().replace("troubled_task:mlp", json.dumps(EVIL)))
    text = written(tmp_path, run).read_text(encoding="utf-8")
    assert EVIL not in text
    assert "<script>window" not in text
    assert "<img" not in text
    assert "&lt;script&gt;window.spoiled" in text


def test_text_in_chart_data_is_only_text(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    incident = {"step": 3, "kind": EVIL, "in_a_row": 1, "fatal": False, "grad_norm": "nan", "micro_batches": []}
    (run / "incidents.jsonl").write_text(json.dumps(incident) + "\n")
    file = written(tmp_path, run)
    assert EVIL not in file.read_text()
    skipped = data_of(file)["charts"]["gradient-norm"]["curves"][-1]
    # Plotly takes some HTML in texts, of which scripts and handlers are no part; `<` stands for itself here.
    assert skipped["texts"] == [f"step 3 was skipped: {html.escape(EVIL)}, norm nan"]


def test_the_page_names_no_other_place(finished: Path, tmp_path: Path) -> None:
    shown = page.content_of([("one", read_run(finished))])
    whole = page.page_of(shown)
    own = whole.replace(get_plotlyjs(), "")
    assert "http://" not in own
    assert "https://" not in own
    assert "connect-src 'none'" in own
    assert "default-src 'none'" in own


def test_skipped_steps_and_restarts_are_marked(finished: Path, tmp_path: Path) -> None:
    run = read_run(finished)
    assert len(run.incidents) >= 1
    norm = data_of(written(tmp_path, finished))["charts"]["gradient-norm"]
    skipped = next(curve for curve in norm["curves"] if curve["name"] == "skipped step")
    assert skipped["x"]["step"] == [incident.step for incident in run.incidents]
    assert [mark["x"]["step"] for mark in norm["marks"]] == [5]


def test_a_price(finished: Path, tmp_path: Path) -> None:
    run = read_run(finished)
    assert f"<b>{1e6 * run.process_hours:,.2f}</b>" in written(tmp_path, finished, price=1e6).read_text()
    for price in (-1.0, float("nan")):
        with pytest.raises(RecipeError, match="--price is"):
            written(tmp_path, finished, price=price)


def test_what_is_refused(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RecipeError, match="holds no run"):
        written(tmp_path, tmp_path)
    with pytest.raises(RecipeError, match=r"ends in \.html"):
        write_and_serve.write_report([finished], tmp_path / "page.pdf")
    (tmp_path / "mine.html").write_text("<p>my own")
    with pytest.raises(RecipeError, match="is no report of this toolkit"):
        write_and_serve.write_report([finished], tmp_path / "mine.html")
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match="--to: "):
        write_and_serve.write_report([finished], tmp_path / "file" / "page.html")
    monkeypatch.setattr(write_and_serve, "EXTRA", ("plotly", "not_there_at_all"))
    with pytest.raises(RecipeError, match=r"not_there_at_all.*pip install 'finetune\[report\]'"):
        written(tmp_path, finished)


# ---------------------------------------------------------------- what is drawn


def test_extremes_survive_downsampling() -> None:
    y = np.sin(np.arange(1_000_000) / 1e4)
    y[123_456], y[654_321], y[500_000] = 50.0, -50.0, np.nan
    chosen = downsample_curve(y)
    assert len(chosen) <= MOST_POINTS + 2
    assert {0, 123_456, 654_321, len(y) - 1} <= set(chosen.tolist())
    assert (np.diff(chosen) > 0).all()
    assert downsample_curve(y[:100]).tolist() == list(range(100))
    assert len(downsample_curve(np.full(10_000, np.nan))) <= MOST_POINTS + 2


def test_running_mean() -> None:
    y = np.array([1.0, np.nan, 3.0, 5.0])
    np.testing.assert_allclose(running_mean(y, 2), [1.0, 1.0, 3.0, 4.0])
    np.testing.assert_allclose(running_mean(y, 10), [1.0, 1.0, 2.0, 3.0])


def test_a_long_run_gives_a_page_of_reasonable_size(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    line = next(line for line in lines if "grad_norm" in line)
    with (run / "metrics.jsonl").open("w") as file:
        for step in range(1, 60_001):
            file.write(json.dumps({**line, "step": step, "loss": 2 + (step % 17) / 10, "tokens": 50 * step}) + "\n")
    file = written(tmp_path, run)
    # 4.8 MB of it are Plotly.
    assert file.stat().st_size < 7_000_000
    assert f"at most {MOST_POINTS:,} points" in file.read_text()
    drawn = data_of(file)["charts"]["loss"]["curves"]
    assert [curve["style"] for curve in drawn[:2]] == ["faint", "line"]


def test_differences() -> None:
    trees = [
        {"a": {"b": 1, "c": 2}, "output": {"dir": "x"}},
        {"a": {"b": 1, "c": 3}, "output": {"dir": "y"}, "d": None},
    ]
    assert differing_keys(trees) == {"a.c": ["2", "3"]}
    assert differing_keys([{"a": 1}, {"a": "1", "b": 2}]) == {"b": ["–", "2"]}
    long = "x" * 500
    sources: list[list[dict[str, Any]]] = [
        [{"path": "a", "weight": 1.0}],
        [{"path": long, "weight": 1.0}, {"path": "c"}],
    ]
    assert differing_keys([{"data": {"train": train}} for train in sources]) == {
        "data.train.0.path": ["a", long],
        "data.train.1.path": ["–", "c"],
    }
    assert differing_keys([{"stop": ["a"]}, {"stop": ["a", "b"]}]) == {"stop": ['["a"]', '["a", "b"]']}


def test_each_figure_of_memory_says_whose_it_is(finished: Path, tmp_path: Path) -> None:
    run = read_run(finished)
    measured = dataclasses.replace(run, facts={**run.facts, "peak_memory": {"of": "resident", "measured": 3 * 2**20}})
    whose = "peak memory of training, fullest rank, over what its process held before"
    assert run_summary.peak_memory(measured) == ("3.00 MiB", whose)
    chart = data_of(written(tmp_path, finished))["charts"]["memory"]
    assert chart["title"] == "Peak memory of rank 0's process, with its libraries, so far"
    alone = dataclasses.replace(run, facts={**run.facts, "peak_memory": None})
    assert run_summary.peak_memory(alone)[1] == "peak memory of rank 0's process, with its libraries"
    on_gpu = dataclasses.replace(alone, facts={**alone.facts, "runs": {"device": "cuda"}})
    assert run_summary.peak_memory(on_gpu)[1] == "peak memory of rank 0"


def test_a_run_without_a_step(finished: Path, tmp_path: Path) -> None:
    run = copy(finished, tmp_path / "run")
    (run / "metrics.jsonl").unlink()
    assert "No step is logged yet" in written(tmp_path, run).read_text()


def test_what_a_plan_predicts(finished: Path, tmp_path: Path) -> None:
    facts = json.loads((finished / "run.json").read_text())
    assert not (facts["peak_memory"] or {}).get("predicted")  # no transformer
    assert "No prediction: " in written(tmp_path, finished).read_text()
    run = copy(finished, tmp_path / "run")
    facts["peak_memory"] = {"of": "allocated", "measured": 2**30, "predicted": 3 * 2**30}
    (run / "run.json").write_text(json.dumps(facts))
    assert "3.00 GiB" in written(tmp_path, run).read_text()


def test_time_units() -> None:
    assert [charts.time_unit(seconds)[0] for seconds in (0, 199, 201, 12_001, 720_001)] == [
        "s",
        "s",
        "min",
        "h",
        "days",
    ]


def test_live_options_need_live(finished: Path) -> None:
    from finetune.cli.main import main

    assert main(["report", str(finished), "--port", "1"]) == 2
    assert main(["report", str(finished), "--live", "--to", "x.html"]) == 2
    assert write_and_serve.LOOPBACK == "127.0.0.1"
