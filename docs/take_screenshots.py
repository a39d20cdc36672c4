"""Make the docs' screenshots: run the demo, and photograph its pages with Chromium.

    python docs/take_screenshots.py            # minutes; writes docs/images/plan_page.png

Needs Debian's package chromium, or another with its path in CHROMIUM.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

IMAGES = Path(__file__).parent / "images"
SIZE = {"width": 1500, "height": 950}
PATIENCE = 300_000  # milliseconds


def main() -> int:
    """Run the demo up to the end of its sweep, take the pictures, stop it."""
    chromium = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if chromium is None:
        print("There is no chromium here; install it, or name one in CHROMIUM", file=sys.stderr)
        return 2
    saturn = Path(sys.executable).with_name("saturn")
    with tempfile.TemporaryDirectory() as folder:
        command = [str(saturn), "demo", "--keep", "--state", folder]
        demo = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env={**os.environ, "COLUMNS": "120"}
        )
        try:
            printed = ""
            for line in demo.stdout or ():
                print(line, end="")
                printed += line
                if "stay up" in line:
                    break
            pages = dict(re.findall(r"^(Airflow|MLflow) +(http://\S+/\S+)$", printed, re.MULTILINE))
            if len(pages) < 2:
                return 1
            with sync_playwright() as playwright:
                browser = playwright.chromium.launch(executable_path=chromium)
                page = browser.new_page(viewport=SIZE)
                page.set_default_timeout(PATIENCE)
                photograph(
                    page, f"{pages['Airflow']}/plugin/saturn-plan", "#content:not([hidden])", "plan_page"
                )
                browser.close()
        finally:
            demo.send_signal(signal.SIGINT)
            demo.wait()
    return 0


def photograph(page: Page, url: str, sign: str, name: str) -> None:
    """Save what ``url`` shows once ``sign`` is there, in the page or a frame of it."""
    page.goto(url)
    frame = page.frame_locator("iframe") if "/plugin/" in url else page
    frame.locator(sign).first.wait_for()
    page.wait_for_timeout(3000)  # charts move to their places
    page.screenshot(path=IMAGES / f"{name}.png")
    print(f"{IMAGES / name}.png")


if __name__ == "__main__":
    sys.exit(main())
