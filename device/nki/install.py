"""`import nki` means the simulator: module objects put into `sys.modules`, when asked for."""

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from .errors import NotModelled

PACKAGE = __package__ or "trnsim.device.nki"
MODULES = {
    "nki.isa": "isa",
    "nki.isa.constants": "isa",
    "nki.language": "language",
    "nki.language.dtypes": "language",
    "nki.collectives": "collectives",
}
"""Modules of the vendor's package and the ones here that stand for them."""


def install() -> ModuleType:
    """Puts `nki` and its modules into `sys.modules`, in place of any other; returns `nki`."""
    uninstall()
    root = _root()
    sys.modules["nki"] = root
    for name, own in MODULES.items():
        module = _module(f"{PACKAGE}.{own}", name)
        sys.modules[name] = module
        _attach(name, module)
    typing = _typing()
    for name, module in (("nki.typing", typing), ("nki.dtype", _dtypes())):
        sys.modules[name] = module
        _attach(name, module)
    _install_legacy_typing(typing)
    return root


def uninstall() -> None:
    """Takes every module called nki or nki.something out of `sys.modules`."""
    for name in [name for name in sys.modules if name == "nki" or name.startswith("nki.")]:
        del sys.modules[name]
    for name in LEGACY:
        if getattr(sys.modules.get(name), "__trnsim__", False):
            del sys.modules[name]


LEGACY = ("neuronxcc", "neuronxcc.nki", "neuronxcc.nki.typing")
"""New-style kernels still import their annotations from here; the rest of it is not modelled."""


def _install_legacy_typing(typing: ModuleType) -> None:
    """Unless the vendor's neuronxcc is installed: its annotations serve as well as ours."""
    if "neuronxcc" in sys.modules or importlib.util.find_spec("neuronxcc") is not None:
        return
    for name in LEGACY:
        made = ModuleType(name)
        made.__dict__.update(__path__=[], __trnsim__=True)
        made.__getattr__ = _refusal(name)  # type: ignore[method-assign]
        sys.modules[name] = made
    sys.modules["neuronxcc"].__dict__["nki"] = sys.modules["neuronxcc.nki"]
    sys.modules["neuronxcc.nki"].__dict__["typing"] = sys.modules["neuronxcc.nki.typing"]
    for annotation in ("tensor", "mutable_tensor"):
        setattr(sys.modules["neuronxcc.nki.typing"], annotation, getattr(typing, annotation))


def _root() -> ModuleType:
    from .kernel import Kernel, jit, simulated

    root = ModuleType("nki", "NKI on trnsim's simulated NeuronCores.")
    root.__dict__.update(jit=jit, simulate=simulated, Kernel=Kernel, __path__=[])
    root.__getattr__ = _refusal("nki")  # type: ignore[method-assign]
    return root


def _module(own: str, name: str) -> ModuleType:
    """The module here, or if it is not there one that says so on use."""
    try:
        return importlib.import_module(own)
    except ModuleNotFoundError as error:
        if error.name != own:
            raise
    missing = ModuleType(name)
    missing.__getattr__ = _refusal(name)  # type: ignore[method-assign]
    return missing


def _attach(name: str, module: ModuleType) -> None:
    parent, _, child = name.rpartition(".")
    if parent == "nki":  # the others' parents are modules here: they stay as they are
        setattr(sys.modules[parent], child, module)


def _typing() -> ModuleType:
    from .language import ndarray

    made = ModuleType("nki.typing", "Names for annotations.")
    made.__dict__.update(tensor=ndarray, mutable_tensor=ndarray)
    made.__getattr__ = _refusal("nki.typing")  # type: ignore[method-assign]
    return made


def _dtypes() -> ModuleType:
    from .dtypes import DTYPES, DType

    made = ModuleType("nki.dtype", "Element types.")
    made.__dict__.update({"DType": DType, "bool_": DTYPES["bool"], **DTYPES})
    return made


def _refusal(name: str) -> Any:
    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        raise NotModelled(f"{name}.{attribute}")

    return missing
