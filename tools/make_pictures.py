"""Make the pictures of the README: what `tools/demo` shows in a terminal, as SVG, and its report in a browser, as PNG.

It runs the demo, in which colours are asked for and nothing moves, and needs a Chromium (`apt-get install chromium`).
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from playwright.sync_api import sync_playwright
from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).resolve().parent.parent
PICTURES = ROOT / "docs" / "pictures"
WIDTH = 112  # columns
FIRST, LAST = 6, 4  # steps that are shown
WAIT_S = 900
# rich: colours without a terminal, and no live line.
SHOWN = {"FORCE_COLOR": "1", "TTY_INTERACTIVE": "0", "COLUMNS": str(WIDTH)}


def main() -> None:
    """Run the demo in a folder of its own; write both pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="settings of the demo")
    words = parser.parse_args().words
    PICTURES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="offbeat-") as folder:
        run = Path(folder) / "demo"
        command = [
            str(Path(sys.executable).parent / "offbeat-train"),
            "task=arithmetic",
            f"run_dir={run}",
            *words,
        ]
        done = subprocess.run(
            command,
            cwd=folder,
            env={**os.environ, **SHOWN},
            stdout=subprocess.PIPE,
            text=True,
            timeout=WAIT_S,
            check=True,
        )
        (PICTURES / "demo.svg").write_text(
            drawn(done.stdout.replace(f"{folder}/", "runs/").replace(folder, ".")), encoding="utf-8"
        )
        photograph(run / "report.html", PICTURES / "report.png")


def drawn(said: str) -> str:
    """Return what a terminal showed as SVG: the start, the first and the last steps, and the panel at the end."""
    lines = Text.from_ansi(said).split("\n")
    steps = [number for number, line in enumerate(lines) if re.match(r"\s*\d+\s+\S", line.plain)]
    panel = next(number for number, line in enumerate(lines) if line.plain.startswith("╭"))
    begun = next(number for number, line in enumerate(lines) if line.plain.startswith("Samples"))
    header = steps[0] - 1
    shown = [
        *lines[:begun],
        *lines[header : header + 1 + FIRST],
        Text("  ⋮", style="dim"),
        *(lines[number] for number in steps[-LAST:]),
        lines[panel - 2],  # how each column went
    ]
    end = [
        line for line in lines[panel:] if str(Path(sys.prefix)) not in line.plain
    ]  # commands by their path
    with Path(os.devnull).open("w") as nowhere:
        console = Console(record=True, width=WIDTH, file=nowhere, force_terminal=True)
        for line in [*shown, Text(), *end]:
            console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
    svg = console.export_svg(title="tools/demo", unique_id="demo")
    return re.sub(r"@font-face \{.*?\}\s*", "", svg, flags=re.DOTALL)  # they would be fetched from elsewhere


def photograph(page: Path, picture: Path) -> None:
    """Write the top of `page` as a browser shows it."""
    browser_path = shutil.which("chromium")
    if browser_path is None:
        raise SystemExit("make_pictures: no chromium here; apt-get install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=browser_path)
        view = browser.new_page(viewport={"width": 1200, "height": 1500})
        view.goto(page.as_uri())
        view.wait_for_timeout(1500)
        view.screenshot(path=picture)
        browser.close()


if __name__ == "__main__":
    main()
