"""A real headless Chromium for the tests of pages; one for the session."""

import io
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import pytest

PHONE = (360, 740)
DESKTOP = (1280, 900)


class Browser:
    """Opens files, and says what the page asked for, printed and looks like."""

    def __init__(self, chromium: str, chromedriver: str) -> None:
        # Here: machines that only run tests on a GPU need not have it.
        from selenium import webdriver
        from selenium.webdriver.chrome.service import Service

        options = webdriver.ChromeOptions()
        options.binary_location = chromium
        options.add_argument("--headless=new")
        options.add_argument("--disable-dev-shm-usage")
        options.add_argument("--disable-background-networking")
        options.add_argument("--hide-scrollbars")
        if os.geteuid() == 0 or "CI" in os.environ:
            # With it Chromium does not start as root, nor on runners of workflows.
            options.add_argument("--no-sandbox")
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(chromedriver))

    def open(self, file: Path, *, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Show a file in a window of ``size`` CSS pixels; what was logged before is forgotten."""
        width, height = size
        metrics = {
            "width": width,
            "height": height,
            "deviceScaleFactor": 1,
            "mobile": size == PHONE,
        }
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.emulate("screen", dark=dark)
        self.driver.get("about:blank")
        self.messages()
        self.requests()
        self.driver.get(file.as_uri())

    def emulate(self, media: str, *, dark: bool = False) -> None:
        """Change the medium ("screen", "print") and the color scheme of the page that is shown."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"media": media, "features": [scheme]}
        )

    def run(self, script: str, *arguments: Any) -> Any:
        """Run JavaScript in the page and give what it returns."""
        return self.driver.execute_script(script, *arguments)

    def messages(self) -> list[str]:
        """Everything in the console since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self) -> list[str]:
        """The address of everything asked for since the last call, data URIs without their data."""
        events = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        addresses = []
        for url in urls:
            if url.startswith("data:"):
                url = url.split(",")[0]
            addresses.append(url)
        return addresses

    def screenshot(self) -> np.ndarray:
        """What the window shows: ``[height, width, 3]`` float, 0 to 1."""
        return matplotlib.image.imread(io.BytesIO(self.driver.get_screenshot_as_png()))[..., :3]


@pytest.fixture(scope="session", name="browser")
def browser_fixture() -> Iterator[Browser]:
    chromium = shutil.which("chromium")
    chromedriver = shutil.which("chromedriver")
    if not (chromium and chromedriver):
        (pytest.fail if os.environ.get("CI") else pytest.skip)(
            "no chromium and chromedriver on the path; on Debian: apt-get install chromium "
            "chromium-driver"
        )  # a skipped test would look like a passed one
    instance = Browser(chromium, chromedriver)
    yield instance
    instance.driver.quit()
