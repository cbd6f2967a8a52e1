"""Compile a .cu file for the processor of this machine, and launch its kernels on numpy arrays."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import threading
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).resolve().parent
_DTYPES = {
    "f": np.float32,
    "d": np.float64,
    "i": np.int32,
    "h": np.int16,
    "H": np.uint16,
    "b": np.int8,
    "B": np.uint8,
    "q": np.int64,
    "Q": np.uint64,
}


# The macro KERNELS defines kernels whose names end with one of its arguments. This expression finds the
# argument: `f32` in `KERNELS(float, f32)`, and `sum_product` in `KERNELS(sum_product, , SUM, 1, false)`.
_NAME = re.compile(r"^KERNELS\((?:float, |double, |byte, )?(\w+)", re.MULTILINE)
_KERNEL = re.compile(r'extern "C" __global__ void[^(]*\(THREADS(?:, 2)?\)\s+(\w+?)(##NAME)?\(')

_SHARED = re.compile(r"__shared__ (\w+ ([^;\n]+);)")  # Groups: a declaration, and its variables.


def compiler() -> str | None:
    """Return the path of a C++ compiler, or None if none is installed."""
    return next((path for name in ("g++", "c++", "clang++") if (path := shutil.which(name))), None)


def kernel_names(source: str) -> list[str]:
    """Return the names of the kernels of a .cu file, including those that its macro KERNELS defines."""
    made = dict.fromkeys(_NAME.findall(source))
    plain = source.replace("\\\n", "\n")
    return [name + suffix for name, glued in _KERNEL.findall(plain) for suffix in (made if glued else [""])]


# Orders in which threads and blocks run. The file emulator.hpp numbers them by their position here.
TURNS = ("forward", "reversed", "shuffled")
# Compiler flags with which the process ends at out-of-bounds or misaligned access, or at undefined
# arithmetic.
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")


def sanitized_environment() -> dict[str, str] | None:
    """Return environment variables for a process that runs kernels built with SANITIZERS.

    Return None if the compiler has no sanitizers.
    """
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):  # C++ exceptions need the second library.
        command = [compiler() or "g++", f"-print-file-name={name}"]
        path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
        if not path.is_absolute():
            return None
        found.append(str(path.resolve()))
    options = "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0"
    return {"LD_PRELOAD": " ".join(found), "ASAN_OPTIONS": options, "EMULATED_FLAGS": " ".join(SANITIZERS)}


def _share(declaration: re.Match) -> str:
    """Replace a declaration of shared memory by static memory and calls that register the variables."""
    names = re.findall(r"(\w+)(?:\[\w+\])*(?:,|$)", declaration[2])
    return f"static {declaration[1]}" + "".join(f" emulator::share({name});" for name in names)


class Emulated:
    """The kernels of one .cu file on the processor.

    Calls check the arguments against the kernel's signature: a wrong number or type of arguments is an error.
    The environment variable EMULATED_FLAGS gives the compiler more flags.
    """

    def __init__(self, source: str, folder: Path) -> None:
        self.names = kernel_names(source)
        self.turns = TURNS[0]
        self._one_at_a_time = threading.Lock()
        source = _SHARED.sub(_share, source)
        text = f'#include "{HERE / "emulator.hpp"}"\n{source}\n' + "".join(
            f"EMULATE({n})\n" for n in self.names
        )
        flags = os.environ.get("EMULATED_FLAGS", "").split()
        (folder / "emulated.cpp").write_text(text, encoding="utf-8")
        command = [
            compiler() or "g++",
            "-std=c++17",
            "-O1",
            "-ffp-contract=off",
            "-shared",
            "-fPIC",
            "-Wno-unknown-pragmas",
        ]
        command += [*flags, "-o", str(folder / "emulated.so"), str(folder / "emulated.cpp")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            raise AssertionError(f"{' '.join(command)}\n{done.stderr}")
        self.library = ctypes.CDLL(str(folder / "emulated.so"))

    @cache  # noqa: B019  The cache has one small entry per kernel.
    def signature(self, name: str) -> list[str]:
        """Return numpy's type letter of each parameter of the kernel; a pointer has P before its letter."""
        function = getattr(self.library, f"signature_{name}")
        function.restype = ctypes.c_char_p
        return function().decode().split()

    def check(
        self, name: str, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]
    ) -> list[Any]:
        """Check the sizes of a launch and the type of each argument, and return the arguments as C values."""
        wanted = self.signature(name)
        assert len(arguments) == len(wanted), f"{name} takes {len(wanted)} arguments, not {len(arguments)}"
        assert len(block) == 1
        assert all(0 < size <= limit for size, limit in zip(grid, (2**31 - 1, 65535), strict=False)), grid
        values: list[Any] = []
        for position, (argument, letter) in enumerate(zip(arguments, wanted, strict=True)):
            values.append(_as_c(argument, letter, f"{name}, argument {position}"))
        return values

    def launch(
        self,
        name: str,
        grid: tuple[int, ...],
        block: tuple[int, ...],
        arguments: tuple[Any, ...],
        shared: int = 0,
    ) -> None:
        """Run a kernel.

        Arguments are numpy arrays (pointers), numpy scalars, or np.uint64(0) for a null pointer.
        """
        values = self.check(name, grid, block, arguments)
        pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
        sizes = [*grid, 1][:2]
        with self._one_at_a_time:  # The emulator has one static set of threads.
            self.library.emulator_set_turns(TURNS.index(self.turns))
            getattr(self.library, f"emulate_{name}")(
                *(ctypes.c_uint(n) for n in (*sizes, block[0], shared)), pointers
            )


def _as_c(argument: Any, letter: str, where: str) -> Any:
    if not letter.startswith("P"):
        assert isinstance(argument, np.generic), f"{where}: {type(argument).__name__} is no numpy scalar"
        assert argument.dtype == _DTYPES[letter], f"{where}: {argument.dtype} for {letter}"
        return np.ctypeslib.as_ctypes_type(argument.dtype)(argument.item())
    if isinstance(argument, np.generic):
        assert argument.dtype == np.uint64, where
        assert argument == 0, where
        return ctypes.c_void_p(None)
    assert isinstance(argument, np.ndarray), f"{where}: {type(argument).__name__} is no array"
    assert argument.dtype == _DTYPES[letter[1:]], f"{where}: {argument.dtype} for {letter}"
    assert argument.flags.c_contiguous, f"{where} is not contiguous"
    return ctypes.c_void_p(argument.ctypes.data)
