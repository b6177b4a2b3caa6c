"""A study of 1,080 points of Llama-3-70B on 1,024 chips, as Ray tasks on this machine.

    python benchmarks/studies.py

Goal: 60 s on two cores, Ray's start, all compiling, the table and the figures included. Ray's
workers are niced: on a machine that others use they get less than their share.
"""

import os
import tempfile
import time
from pathlib import Path

from trnsim.cluster.studies.definition import read_study
from trnsim.cluster.studies.run import StudyRun
from trnsim.cluster.studies.runners import RUNNERS

STUDY = Path(__file__).parents[1] / "examples" / "studies" / "llama3_70b.toml"


def main() -> None:
    """Prints how long it took."""
    study = read_study(STUDY, tuple(RUNNERS))
    with tempfile.TemporaryDirectory() as folder:
        begin = time.perf_counter()
        table = StudyRun(study, Path(folder)).run()
        seconds = time.perf_counter() - begin
    refused = sum(bool(row["refused"]) for row in table.rows)
    print(
        f"{len(table.rows)} points, {refused} refused: {seconds:.1f} s on {os.cpu_count()} cores,"
        f" load average {os.getloadavg()[0]:.1f}"
    )


if __name__ == "__main__":
    main()
