"""Stands in for SGLang's compiled kernels. A server imports many names from here and, on a CPU with the plain torch
attention, calls none of them; whatever is called all the same says so."""

import importlib.abc
import importlib.machinery
import sys
import types

import torch

__version__ = "0.4.10"  # the oldest that SGLang accepts
__path__ = []  # a package, so that its submodules can be asked for


class Absent:
    """A kernel that can be imported, passed around and asked for attributes, but not called."""

    def __init__(self, name: str):
        self._name = name

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        return Absent(f"{self._name}.{attribute}")

    def __call__(self, *_, **__):
        raise NotImplementedError(f"sgl_kernel.{self._name} has no kernel on this machine")


def __getattr__(name: str):
    if name.startswith("__"):
        raise AttributeError(name)
    return Absent(name)


class Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Any `import sgl_kernel.something` is a module of absent kernels."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.startswith("sgl_kernel.") else None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Submodules())


class Operators(type(torch.ops.sgl_kernel)):
    """torch.ops.sgl_kernel: SGLang looks for the fused CPU operators by name, and falls back to plain torch where the
    lookup of `fused_qk_norm_cpu` fails."""

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.endswith("_cpu") and name != "fused_qk_norm_cpu":
                return Absent(name)
            raise


torch.ops.sgl_kernel.__class__ = Operators
