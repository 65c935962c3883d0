"""Makes docs/report.png: trains a short run, or takes one that is there, and photographs its report in Chromium.

.venv/bin/python scripts/screenshots.py                  # trains recipes/sample.yaml for 120 steps
.venv/bin/python scripts/screenshots.py runs/sample      # takes this run
"""

import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests/support")]

from chromium import chromium  # noqa: E402
from PIL import Image  # noqa: E402

from finetune.diagnostics.run_report.write_and_serve import write_report  # noqa: E402

WIDTH, HEIGHT = 1280, 1240


def train(folder: Path) -> Path:
    """A run that evaluates and samples often enough to show."""
    options = ("length.steps=120", "log.every_steps=1", "eval.every_steps=20", "sample.every_steps=20")
    command = [sys.executable, str(ROOT / "scripts/train.py"), str(ROOT / "recipes/sample.yaml")]
    subprocess.run([*command, f"output.dir={folder / 'sample'}", *options, "checkpoint.every_steps=40"], check=True)
    return folder / "sample"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Path(sys.argv[1]) if len(sys.argv) > 1 else train(Path(folder))
        page = write_report([run], Path(folder) / "report.html", price=2.0)[0]
        with chromium() as browser:
            browser.open(page, width=WIDTH)
            browser.resize(WIDTH, HEIGHT)
            browser.wait("return innerHeight === arguments[0]", HEIGHT)
            browser.js("window.scrollTo(0, 0)")
            picture = ROOT / "docs/report.png"
            browser.driver.save_screenshot(str(picture))
        # A third of the size, with no difference to be seen.
        Image.open(picture).convert("RGB").quantize(128, dither=Image.Dither.NONE).save(picture, optimize=True)


if __name__ == "__main__":
    main()
