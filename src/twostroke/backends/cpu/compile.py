"""LLVM IR to callable native code, kept on disk between processes. What is loaded is verified first: an entry that is
truncated or corrupt is compiled again, and a folder that cannot be written only costs the next process its time."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm

from twostroke.backends.cpu.isa import InstructionSet
from twostroke.cache import cache_folder, read_entry, write_entry


class NativeCode:
    """Functions of some object files, which may call each other; alive as long as this object is."""

    def __init__(self, objects: Sequence[bytes], isa: InstructionSet, *, from_cache: bool) -> None:
        self.from_cache = from_cache
        self.variants: Mapping[str, NativeCode] = {}
        """Functions of the same names for other sizes."""
        self._engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine(isa))
        for code in objects:
            self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str, variant: str | None = None) -> int:
        if variant is not None:
            return self.variants[variant].address(name)
        found = int(self._engine.get_function_address(name))
        if not found:
            raise KeyError(name)
        return found


def load_or_compile(parts: Mapping[str, Callable[[], str]], isa: InstructionSet) -> NativeCode:
    """Modules by labels, which name what each is specialised for. A module's text is asked for on a miss only, and may
    then import the generators."""
    objects, missed = [], 0
    for label, module_text in parts.items():
        path = _entry_path(label, isa)
        code = read_entry(path)
        if code is None:
            missed += 1
            code = compile_object(module_text(), isa)
            write_entry(path, code)
        objects.append(code)
    return NativeCode(objects, isa, from_cache=not missed)


def compile_object(module_text: str, isa: InstructionSet, triple: str | None = None) -> bytes:
    """Optimised object code; for another machine's `triple`, it can be inspected but not run."""
    machine = _target_machine(isa, triple)
    module = llvm.parse_assembly(module_text)
    module.verify()
    passes = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(module, passes)
    return bytes(machine.emit_object(module))


def _target_machine(isa: InstructionSet, triple: str | None = None) -> llvm.TargetMachine:
    if triple is None:
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        target = llvm.Target.from_default_triple()
    else:
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
        target = llvm.Target.from_triple(triple)
    return target.create_target_machine(cpu=isa.cpu, features=isa.features, opt=3, jit=True)


def _entry_path(label: str, isa: InstructionSet) -> Path:
    parts = (label, isa.name, isa.architecture, isa.cpu, isa.features, *_builder_identity())
    return cache_folder() / "kernels" / f"{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}.o"


@cache
def _builder_identity() -> tuple[str, ...]:
    """What else decides the code: LLVM, the CPU it compiles for, and the source of this package."""
    sources = hashlib.sha256()
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        sources.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    llvm_version = ".".join(str(number) for number in llvm.llvm_version_info)
    return (llvmlite.__version__, llvm_version, llvm.get_host_cpu_name(), sources.hexdigest())
