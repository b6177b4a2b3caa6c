"""NKI kernels in files: `FILE.py:NAME`, whose `import nki` is the simulator."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from trnsim.device.errors import BadFile, BadInput
from trnsim.device.nki.install import install
from trnsim.device.nki.kernel import Kernel, jit


def load_kernel(place: str) -> Kernel:
    """The kernel at FILE.py:NAME. Raises BadInput if there is no such file or name."""
    file, colon, name = place.rpartition(":")
    path = Path(file)
    if not colon or not path.is_file():
        raise BadInput("kernel", place, "FILE.py:NAME of a file that exists")
    module = _module(path)
    found = getattr(module, name, None)
    if not callable(found):
        names = [key for key, value in vars(module).items() if isinstance(value, Kernel)]
        raise BadInput("kernel", name, names)
    return jit(found)


def _module(path: Path) -> ModuleType:
    """The module of a file, under its dotted name if it lies in a package."""
    install()
    root, names = path.resolve().parent, [path.stem]
    while (root / "__init__.py").is_file():
        root, names = root.parent, [root.name, *names]
    sys.path.insert(0, str(root))
    try:
        return importlib.import_module(".".join(names)) if len(names) > 1 else _executed(path)
    except (SyntaxError, ImportError) as error:
        raise BadFile(f"{path}: {error}") from None


def _executed(path: Path) -> ModuleType:
    """The file's module under its own name, whatever is imported by that name already."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise BadInput("kernel", path, "a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
