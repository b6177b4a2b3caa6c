"""Runs the commands of the documentation again and puts what they print in place.

    python docs/outputs.py [--check] [FILE...]     default: README.md and docs/*.md

A fenced block whose first line is `$ COMMAND` holds a command for bash, run from the root of the
repository with `trnsim` on the PATH, and its output; blanks at the ends of lines are cut off. A
command may go on after a backslash. With --check nothing is written, and what differs is named.
"""

import argparse
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```\n\$ (?P<command>(?:.*\\\n)*.*)\n(?P<output>(?:.*\n)*?)```$", re.MULTILINE)


def pages() -> list[Path]:
    """The pages of the documentation."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def commands(text: str) -> list[str]:
    """The commands of a page, each on one line."""
    return [match["command"].replace("\\\n", " ") for match in BLOCK.finditer(text)]


def printed(command: str) -> str:
    """What a command prints. Raises CalledProcessError for one that fails."""
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], cwd=ROOT, check=True, stdout=subprocess.PIPE
    )
    lines = [line.rstrip() for line in done.stdout.decode().splitlines()]
    return "\n".join(lines).strip("\n") + "\n"


def renewed(text: str) -> str:
    """A page with all its outputs new."""

    def block(match: re.Match[str]) -> str:
        print(f"$ {match['command']}", file=sys.stderr)
        return f"```\n$ {match['command']}\n{printed(match['command'])}```"

    return BLOCK.sub(block, text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("files", nargs="*", type=Path)
    asked = parser.parse_args()
    different = False
    for path in asked.files or pages():
        old = path.read_text()
        new = renewed(old)
        if new != old and asked.check:
            print(f"{path}: its outputs are not those of today")
            different = True
        elif new != old:
            path.write_text(new)
    sys.exit(different)


if __name__ == "__main__":
    main()
