#!/usr/bin/env python3
"""Makes SGLang serve on a CPU with its prefill and decode apart over NIXL. usage: patch.py SITE_PACKAGES

Every patch says why, and stops with an error where the file is not as it was when the patch was written.
"""
import pathlib
import sys

RELEASE = "0.5.23"

# sgl_kernel is CUDA only and is imported by most of SGLang. This one has every name, and none of them works: a dense Llama with
# attention by torch and sampling by PyTorch calls none of them.
KERNEL = '''\
"""Stands in for sgl_kernel, which needs CUDA: every name can be imported and none can be called."""
import importlib.abc
import importlib.machinery
import sys
import types

__version__ = "0.4.10"  # SGLang compares it


def _missing(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs CUDA")

    kernel.__name__ = name
    return kernel


class _Module(types.ModuleType):
    def __getattr__(self, name):
        return _missing(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname, path=None, target=None):
        if fullname.startswith("sgl_kernel.") and "scalar_type" not in fullname:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec):
        module = _Module(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, _Finder())


def __getattr__(name):
    return _missing(name)
'''


def replace(path: pathlib.Path, old: str, new: str, count: int) -> None:
    text = path.read_text()
    if text.count(old) != count:
        raise SystemExit(f"{path}: {old!r} is there {text.count(old)} times, not {count}: not SGLang {RELEASE}?")
    path.unlink()  # installers link files from their cache: write a new one
    path.write_text(text.replace(old, new))


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    site = pathlib.Path(sys.argv[1])
    if not (site / f"sglang-{RELEASE}.dist-info").is_dir():
        raise SystemExit(f"written for SGLang {RELEASE}")
    kernel = site / "sgl_kernel"
    kernel.mkdir()
    (kernel / "__init__.py").write_text(KERNEL)
    # SGLang registers its KV cache with NIXL as GPU memory (VRAM). UCX refuses that of host memory.
    disaggregation = site / "sglang/srt/disaggregation"
    replace(disaggregation / "nixl/conn.py", '"VRAM"', '"DRAM"', 30)
    replace(disaggregation / "decode.py", '"VRAM"', '"DRAM"', 3)


if __name__ == "__main__":
    main()
