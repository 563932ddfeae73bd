"""Stands in for SGLang's kernel package, of which PyPI holds CUDA builds only.

SGLang imports many names from it and, with the torch_native attention backend and the pytorch sampling backend, calls none
of them. So every name exists and every call fails loudly. `sgl_kernel.scalar_type` is real code: install.sh copies vLLM's.
"""

import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"  # the version that SGLang 0.5.23 checks for


def _absent(name):
    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} has no CPU build")

    kernel.__name__ = name
    return kernel


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    return _absent(name)


# Found by hasattr-like checks, so it has to be a real attribute.
copy_all_layer_kv_cache_cpu = _absent("copy_all_layer_kv_cache_cpu")


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes every `import sgl_kernel.x` succeed, with the same loud stand-ins inside."""

    def find_spec(self, name, path, target=None):
        if name.startswith("sgl_kernel.") and name != "sgl_kernel.scalar_type":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        module = types.ModuleType(spec.name)
        module.__getattr__ = __getattr__
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.append(_Submodules())
