"""NKI kernels on simulated NeuronCores: `simulate(kernel, *inputs)`, `install()`."""

from .install import install, uninstall
from .kernel import simulate

__all__ = ["install", "simulate", "uninstall"]
