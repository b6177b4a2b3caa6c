"""`trnsim kernel` in this process: exit code, standard output, standard error."""

import sys

from trnsim.cluster.cli import main


def run_command(capsys, monkeypatch, *words) -> tuple[int, str, str]:
    """(exit code, standard output, standard error) of `trnsim kernel WORDS`."""
    monkeypatch.setattr(sys, "argv", ["trnsim", "kernel", *map(str, words)])
    try:
        main()
        code = 0
    except SystemExit as done:
        code = int(done.code or 0)
    out, err = capsys.readouterr()
    return code, out, err
