"""A page as a browser shows it that has no window and no network."""

import pathlib
import shutil
import subprocess


def browser() -> str | None:
    """Chromium, if there is one."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


def dump(page: pathlib.Path, folder: pathlib.Path) -> str:
    """The page after its scripts have run, as HTML."""
    found = subprocess.run(
        [
            *(browser(), "--headless", "--no-sandbox", "--disable-gpu"),
            f"--user-data-dir={folder / 'profile'}",
            "--host-resolver-rules=MAP * ~NOTFOUND",
            *("--window-size=1000,3600", "--virtual-time-budget=5000"),
            *("--dump-dom", page.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout
