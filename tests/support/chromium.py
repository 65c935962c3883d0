"""Opens pages in headless Chromium."""

import importlib.util
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from external_commands import needs

BROWSER = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")

# No network, no files but its own; the sandbox needs what containers do not have.
_OPTIONS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
needs_chromium = needs("chromium", "chromedriver")


class Page:
    """A page that is open."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str | Path, *, width: int = 1280, theme: str = "light") -> "Page":
        """Opens a file or an address, and waits until its charts are drawn."""
        self.driver.get_log("browser")
        media = [{"name": "prefers-color-scheme", "value": theme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": media})
        self.resize(width, 900)
        self.driver.get(address if isinstance(address, str) else address.resolve().as_uri())
        self.wait("return [...document.querySelectorAll('[data-chart]')].every((b) => b.querySelector('.main-svg'))")
        return self

    def resize(self, width: int, height: int) -> None:
        """A window of this size; a phone's if it is narrow."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def js(self, code: str, *arguments: Any) -> Any:
        """What a piece of JavaScript returns."""
        return self.driver.execute_script(code, *arguments)

    def wait(self, code: str, *arguments: Any, seconds: float = 60) -> Any:
        """Waits until a piece of JavaScript returns something true."""
        from selenium.webdriver.support.ui import WebDriverWait

        return WebDriverWait(self.driver, seconds, 0.1).until(lambda driver: driver.execute_script(code, *arguments))

    def click(self, selector: str) -> None:
        from selenium.common.exceptions import StaleElementReferenceException
        from selenium.webdriver.common.by import By
        from selenium.webdriver.support.ui import WebDriverWait

        def clicked(driver: Any) -> bool:
            driver.find_element(By.CSS_SELECTOR, selector).click()
            return True

        # A page that refreshes may replace what was found.
        WebDriverWait(self.driver, 60, 0.1, [StaleElementReferenceException]).until(clicked)

    def hover(self, chart: str, across: float = 0.5) -> str:
        """What a chart shows where the mouse is."""
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.by import By

        area = self.driver.find_element(By.CSS_SELECTOR, f'[data-chart="{chart}"] .nsewdrag')
        self.js("arguments[0].scrollIntoView({block: 'center'})", area)
        offset = round(area.size["width"] * (across - 0.5))
        ActionChains(self.driver).move_to_element_with_offset(area, offset - 5, 0).move_by_offset(5, 0).perform()
        words = f"return document.querySelector('[data-chart=\"{chart}\"] .hoverlayer').textContent"
        return str(self.wait(words))

    def traces(self) -> dict[str, int]:
        """How many curves each chart has drawn."""
        curves = "[b.dataset.chart, b.querySelectorAll('.scatterlayer .trace').length]"
        return dict(self.js(f"return [...document.querySelectorAll('[data-chart]')].map((b) => {curves})"))

    def console(self) -> list[str]:
        """What went wrong, as the console has it."""
        return [line["message"] for line in self.driver.get_log("browser") if line["level"] in ("SEVERE", "WARNING")]

    def violations(self) -> list[str]:
        """What axe finds, with everything folded open: rules, and the first element that breaks each."""
        found = importlib.util.find_spec("axe_playwright_python")
        assert found is not None, "axe is not installed: `make setup`"
        self.js("for (const part of document.querySelectorAll('details')) part.open = true")
        self.js((Path(str(found.origin)).parent / "axe.min.js").read_text(encoding="utf-8"))
        run = "const done = arguments[0]; axe.run().then((found) => done(found), (error) => done(String(error)))"
        result = self.driver.execute_async_script(run)
        assert isinstance(result, dict), result
        assert len(result["passes"]) > 10
        return [f"{rule['id']}: {rule['nodes'][0]['target']}" for rule in result["violations"]]

    def press(self, *keys: str) -> None:
        """Presses keys, one after the other, wherever the focus is."""
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def unreachable(self) -> list[str]:
        """Controls that the tab key does not come to, or that do not show that they have the focus."""
        controls = "[...document.querySelectorAll('a[href], button, input, select, summary, .scroll[tabindex]')]"
        self.js(f"window.left = new Set({controls}.filter((one) => one.checkVisibility()))")
        self.js("document.activeElement.blur()")
        many = int(self.js("return left.size"))
        assert many > 0
        for _ in range(many):
            self.press("\ue004")
            # An outline of the browser's, or of the page's.
            at = "document.activeElement"
            self.js(f"if (getComputedStyle({at}).outlineStyle !== 'none') left.delete({at})")
        return list(self.js("return [...left].map((one) => one.outerHTML.slice(0, 80))"))

    def overflow(self) -> int:
        """Pixels by which the page is wider than the window."""
        return int(self.js("return document.documentElement.scrollWidth - document.documentElement.clientWidth"))

    def cut_labels(self) -> list[str]:
        """Labels of vertical axes that begin left of their chart."""
        labels = "[...document.querySelectorAll('.ytick text')]"
        left = "label.closest('.chart').getBoundingClientRect().left"
        cut = f"{labels}.filter((label) => label.getBoundingClientRect().left < {left})"
        return list(self.js(f"return {cut}.map((label) => label.textContent)"))


@contextmanager
def chromium() -> Iterator[Page]:
    """A browser."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    with tempfile.TemporaryDirectory() as profile:
        options = Options()
        options.binary_location = str(BROWSER)
        for option in (*_OPTIONS, f"--user-data-dir={profile}", "--window-size=1280,900"):
            options.add_argument(option)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options=options, service=Service(str(DRIVER)))
        try:
            yield Page(driver)
        finally:
            driver.quit()
