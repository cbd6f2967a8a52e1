"""A numba compiler for *subkernels*: functions that are called only by other compiled functions.

numba optimises and translates each function that a kernel calls, and then does both again for the kernel,
into which the function is inlined. This took half of the time of a first fit. A subkernel is only lowered to
LLVM's code; the kernel that calls it is optimised and translated once, as a whole.
"""

from __future__ import annotations

from typing import Any

from numba._dynfunc import make_function
from numba.core import codegen, compiler, typed_passes
from numba.core.compiler_machinery import register_pass


class _Library(codegen.JITCodeLibrary):
    """LLVM code of a subkernel (a function that only kernels call) and of the subkernels that it calls.

    This class neither optimises the code nor translates it to machine code, because numba does both with the
    kernel into which the subkernel is inlined.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


@register_pass(mutates_CFG=True, analysis_only=False)
class _Lowering(typed_passes.NativeLowering):
    """numba's translation of a function to LLVM code, without the step that makes machine code."""

    _name = "subkernel_lowering"

    def run_pass(self, state: Any) -> bool:
        """Lower the function and register it for the functions that call it."""
        state.library = _Library(state.targetctx.codegen(), state.func_id.func_qualname)
        state.flags.no_compile = True
        super().run_pass(state)
        lowered = state.cr
        # Kernels find the code of a function by this Python object; address 0 makes calls from Python fail.
        name = state.func_id.func_name
        key = make_function(lowered.fndesc.lookup_module(), name, "", 0, lowered.env, (state.library,))
        state.targetctx.insert_user_function(key, lowered.fndesc, [state.library])
        state.cr = lowered._replace(cfunc=key)
        return True


class SubkernelCompiler(compiler.Compiler):
    """Compiler of :class:`.jit.subkernel`: numba's compiler, but its last pass makes no machine code."""

    def define_pipelines(self) -> list[Any]:
        """Return numba's passes, with :class:`_Lowering` in place of numba's lowering."""
        (passes,) = super().define_pipelines()
        passes.passes = [
            (_Lowering if step is typed_passes.NativeLowering else step, what) for step, what in passes.passes
        ]
        passes.finalize()
        return [passes]
