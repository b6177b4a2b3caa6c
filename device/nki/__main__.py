"""`python -m trnsim.device.nki script.py [args]`: a script whose `import nki` is the simulator."""

import os
import runpy
import sys

from ..errors import TrnsimError
from .install import install

BAD_INPUT = 2


def main(arguments: list[str]) -> int:
    """Runs the script; 2 for bad input, which is one line on standard error."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: python -m trnsim.device.nki script.py [args]\n\n{__doc__}", file=sys.stderr)
        return 0 if arguments else BAD_INPUT
    script = arguments[0]
    if not os.path.isfile(script):
        print(f"trnsim: error: script: {script} is not a file", file=sys.stderr)
        return BAD_INPUT
    install()
    sys.argv = arguments
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    try:
        runpy.run_path(script, run_name="__main__")
    except TrnsimError as error:
        print(f"trnsim: error: {' '.join(str(error).split())}", file=sys.stderr)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
