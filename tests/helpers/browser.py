"""The browser that tests drive: the system's Chromium or Chrome, else the one Playwright installed, else a refusal.

`python tests/helpers/browser.py` says which one it is, or fails with the command that brings one.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Browser, Playwright, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
MISSING = (
    "The page is tested in a real browser and there is none: run `apt-get install chromium` as root, or else "
    f"`{Path(sys.executable).parent / 'playwright'} install --with-deps chromium`."
)


def find_browser(playwright: Playwright) -> str:
    """The program to start. A browser that is missing is never a reason to skip."""
    installed = [path for name in NAMES if (path := shutil.which(name))]
    for path in [*installed, playwright.chromium.executable_path]:
        if _runs(path):
            return path
    raise RuntimeError(MISSING)


def _runs(path: str) -> bool:
    """Some systems have a `chromium-browser` that only says how to install one."""
    try:
        return subprocess.run([path, "--version"], capture_output=True, timeout=30, check=False).returncode == 0
    except (OSError, subprocess.TimeoutExpired):
        return False


def launch_browser(playwright: Playwright) -> Browser:
    """Start it without a window. As root Chromium wants its sandbox left out."""
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    return playwright.chromium.launch(executable_path=find_browser(playwright), args=arguments)


if __name__ == "__main__":
    with sync_playwright() as running:
        try:
            sys.stdout.write(find_browser(running) + "\n")
        except RuntimeError as error:
            sys.exit(str(error))
