"""Compile the Triton kernels for GPUs that this machine does not have, and print what each variant needs of one.

    python packages/rl-logprobs/benchmarks/kernel_resources.py [--all] [--dtypes bfloat16] [--targets sm_80 sm_90]

Registers and spilled bytes are the assembler's (ptxas of Triton's wheel; the metadata of the code object on AMD).
Programs a multiprocessor follow from registers, shared memory and threads.  *In flight* is what a multiprocessor has
asked the memory for: each program waits for one tile.  *Needed* is bandwidth times latency over multiprocessors
(Little's law).  *Bound* is the bytes of one call over the bandwidth, for 4,096 rows of 151,936 columns: no kernel is
faster.
"""

from __future__ import annotations

import argparse
import itertools
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from rl_logprobs.norms import chunk_table
from rl_logprobs.norms.triton_kernels import power_kernel, scale_kernel
from rl_logprobs.softmax import triton_backend, triton_divergence
from rl_logprobs.softmax.partial_softmax import SoftmaxOptions
from rl_logprobs.softmax.triton_divergence_kernels import divergence_gradient_kernel, sums_kernel
from rl_logprobs.softmax.triton_kernels import coefficient_kernel, finish_kernel, gradient_kernel, reduce_kernel
from rl_logprobs.tensors import statistics_dtype

ROWS, COLUMNS = 4096, 151_936
POINTERS = {torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.float32: "*fp32", torch.float64: "*fp64"}
#: The types of arguments that are not pointers to statistics.
INT64, FLOAT64 = ("targets", "argmax", "target_rank", "table"), ("state", "gathered", "totals", "temperatures")
LOGITS, POWERS = ("logits", "biases", "out", "weights", "p_logits", "q_logits"), ("powers", "local_max")
KERNELS = (reduce_kernel, gradient_kernel, finish_kernel, coefficient_kernel, power_kernel, scale_kernel)
#: Pointers that a call may leave out, and constants that it may set.
OPTIONAL = ("biases", "min_logits", "greater_than", "valid", "weights", "expected_rows", "temperatures", "totals")
OPTIONAL += (
    "p_biases",
    "q_biases",
    "p_temperatures",
    "q_temperatures",
    "entropy",
    "argmax",
    "target_rank",
    "local_max",
    "d_logsumexp",
    "d_entropy",
)
FLAGS = ("ENTROPY", "ARGMAX", "RANK", "MERGE", "LARGEST", "MIXTURE")


@dataclass(frozen=True)
class Device:
    """A GPU's published figures: bytes a second of its memory, seconds of latency, limits of a multiprocessor."""

    target: GPUTarget
    bandwidth: float
    latency: float
    processors: int
    registers: int = 65_536
    shared_memory: int = 164 << 10
    threads: int = 2048

    @property
    def bytes_needed(self) -> float:
        """Bytes in flight a multiprocessor at which the memory is busy."""
        return self.bandwidth * self.latency / self.processors


#: Latencies under load are measured figures of publications, rounded up.
DEVICES = {
    "sm_80": Device(GPUTarget("cuda", 80, 32), 2.04e12, 6e-7, 108),
    "sm_90": Device(GPUTarget("cuda", 90, 32), 3.35e12, 7e-7, 132, shared_memory=228 << 10),
    "sm_100": Device(GPUTarget("cuda", 100, 32), 8.0e12, 8e-7, 148, shared_memory=228 << 10),
    "gfx942": Device(GPUTarget("hip", "gfx942", 64), 5.3e12, 8e-7, 304, registers=131_072, shared_memory=64 << 10),
}


@dataclass(frozen=True)
class Variant:
    """A kernel, the dtype of its logits, its optional arguments that are given, and its flags that are set."""

    kernel: Any
    dtype: torch.dtype
    given: frozenset[str]
    constants: frozenset[str] = frozenset()

    def __str__(self) -> str:
        """Return the kernel's name and what is computed, as a row of the table names it."""
        parts = sorted(self.given) + sorted(name.lower() for name in self.constants)
        return f"{self.kernel.fn.__name__}({', '.join(parts)}) {str(self.dtype).removeprefix('torch.')}"

    def source(self, device: Device) -> tuple[ASTSource, int]:
        """Return the kernel with the types that a call of ``COLUMNS`` contiguous columns gives it, and its warps."""
        constants = self._constants(device)
        warps = constants.pop("num_warps")
        signature = {}
        for name in self.kernel.arg_names:
            if name in constants or (name in OPTIONAL and name not in self.given):
                signature[name] = "constexpr"
                constants.setdefault(name, None)
            else:
                signature[name] = self._type(name)
        values = {name: constants[name] for name, kind in signature.items() if kind == "constexpr"}
        unspecialised = {self.kernel.arg_names[i] if isinstance(i, int) else i for i in self.kernel.do_not_specialize}
        aligned = [["tt.divisibility", 16]]
        attributes = {
            (i,): aligned
            for i, (name, kind) in enumerate(signature.items())
            if kind != "constexpr" and name not in unspecialised
        }
        return ASTSource(self.kernel, signature, values, attributes), warps

    def _constants(self, device: Device) -> dict[str, Any]:
        wide, warp_size = statistics_dtype(self.dtype), device.target.warp_size
        launch = {"BLOCK": triton_backend.TOKENS, "WIDE": wide, "num_warps": 4}
        if self.kernel is reduce_kernel:
            further = bool(self.constants & {"ARGMAX", "RANK"} or "min_logits" in self.given)
            units = triton_backend.most_units(SoftmaxOptions(argmax=further), warp_size)
            launch = triton_backend.reduce_options(wide, COLUMNS, warp_size, units=units)
        elif self.kernel is sums_kernel:
            units = triton_divergence.UNITS
            launch = triton_backend.reduce_options(wide, COLUMNS, warp_size, units=units)
        elif self.kernel in (gradient_kernel, divergence_gradient_kernel):
            launch = triton_backend.gradient_options(wide, COLUMNS, warp_size)
        elif self.kernel in (power_kernel, scale_kernel):
            launch |= {"BLOCK": chunk_table.BLOCK, "num_warps": 8}
        softcap = 30.0 if "SOFTCAP" in self.constants else None
        found = {name: name in self.constants for name in FLAGS} | launch
        found |= {"SCALE": None, "SOFTCAP": softcap, "CONTIGUOUS": True, "column_stride": 1, "out_column_stride": 1}
        kind = next((kind for kind in range(3) if f"KIND={kind}" in self.constants), 0)
        found |= {"KIND": kind, "LOG2_SHARE": -1.0, "LOG2_OTHER_SHARE": -1.0}
        found |= {f"{side}_column_stride": 1 for side in "pq"}
        found |= {f"{side}_{name}": value for side in "PQ" for name, value in (("SCALE", None), ("SOFTCAP", softcap))}
        found |= {"ELEMENT": self.dtype, "ALIGNED": True, "CHUNK": chunk_table.CHUNK, "ORDER": 2.0}
        names = {"torch.bfloat16": tl.bfloat16, "torch.float16": tl.float16, "torch.float32": tl.float32}
        names["torch.float64"] = tl.float64
        return {name: names.get(str(value), value) for name, value in found.items()}

    def _type(self, name: str) -> str:
        """Return the type of an argument that is no constant."""
        if name in LOGITS:
            half = name in ("out", "weights", "biases") and "MERGE" in self.constants
            return POINTERS[torch.bfloat16 if half else self.dtype]
        if name in INT64:
            return "*i64"
        if name in FLOAT64 + POWERS:
            return "*fp64"
        if name == "ignored":
            return "*i1"
        if name == "valid":
            return "*i32"
        wide = POINTERS[statistics_dtype(self.dtype)]
        pointers = (
            "coefficients",
            "factor",
            "expected_rows",
            "min_logits",
            "greater_than",
            "logprobs",
            "logsumexp",
            "entropy",
            "numbers",
        )
        return wide if name in pointers or name.startswith("d_") else "i32"

    def bytes_moved(self) -> int:
        """Return the bytes of the logits that a call of ``ROWS`` rows reads and writes."""
        if self.kernel in (finish_kernel, coefficient_kernel):
            return ROWS * 8 * 6
        passes = (
            2 if self.kernel in (gradient_kernel, scale_kernel, sums_kernel) else 3 if "weights" in self.given else 1
        )
        return passes * ROWS * COLUMNS * self.dtype.itemsize


def training_variants(dtype: torch.dtype) -> list[Variant]:
    """Return what calls that train a policy launch: on logits, on tiles of a head, and on gradients."""
    logits, entropy = frozenset({"valid"}), frozenset({"ENTROPY"})
    every, tile = frozenset({"greater_than", "min_logits", "valid", "temperatures"}), frozenset({"MERGE"})
    return [
        Variant(reduce_kernel, dtype, logits),
        Variant(reduce_kernel, dtype, logits, entropy),
        Variant(reduce_kernel, dtype, every, frozenset({"ENTROPY", "ARGMAX", "RANK"})),
        Variant(gradient_kernel, dtype, frozenset({"totals"})),
        Variant(gradient_kernel, dtype, frozenset({"totals"}), entropy),
        Variant(reduce_kernel, torch.float32, frozenset(), tile),
        Variant(reduce_kernel, torch.float32, frozenset(), tile | entropy | {"SOFTCAP"}),
        Variant(reduce_kernel, torch.float32, frozenset({"expected_rows", "weights"}), tile),
        Variant(gradient_kernel, torch.float32, frozenset({"totals"}), tile | {"SOFTCAP"}),
        Variant(finish_kernel, dtype, frozenset({"entropy", "totals"}), entropy),
        Variant(coefficient_kernel, dtype, frozenset({"d_entropy", "d_logsumexp", "totals"})),
        Variant(power_kernel, dtype, frozenset()),
        Variant(scale_kernel, dtype, frozenset()),
        *(Variant(sums_kernel, kind, frozenset()) for kind in (dtype, torch.float32)),
        Variant(sums_kernel, torch.float32, frozenset(), frozenset({"MIXTURE"})),
        *(Variant(divergence_gradient_kernel, torch.float32, frozenset(), frozenset({f"KIND={k}"})) for k in range(3)),
    ]


def all_variants(dtype: torch.dtype) -> list[Variant]:
    """Return every combination of statistics, with and without a filter, a bias and weights that are kept."""
    flags = subsets(("ENTROPY", "ARGMAX", "RANK"))
    found = [
        Variant(reduce_kernel, dtype, frozenset({"valid", *given}), constants)
        for given, constants in itertools.product(((), ("min_logits",), ("greater_than", "weights")), flags)
    ]
    found += [
        Variant(reduce_kernel, torch.float32, frozenset(given), constants | {"MERGE"})
        for given in (("biases",), ("expected_rows", "weights"))
        for constants in subsets(("ENTROPY", "ARGMAX", "SOFTCAP"))
    ]
    found += [
        Variant(gradient_kernel, dtype, given | {"totals"}, constants)
        for given, constants in itertools.product(subsets(("min_logits", "temperatures")), subsets(("ENTROPY",)))
    ]
    found += [Variant(gradient_kernel, dtype, frozenset())]
    found += [Variant(power_kernel, dtype, frozenset(), frozenset({"LARGEST"}))]
    return list(dict.fromkeys(found + training_variants(dtype)))


def subsets(names: Sequence[str]) -> list[frozenset[str]]:
    """Return all subsets of some names, smaller ones first."""
    return [frozenset(found) for count in range(len(names) + 1) for found in itertools.combinations(names, count)]


@dataclass(frozen=True)
class Resources:
    """The needs of one program of a compiled kernel, and what they allow on a device."""

    device: Device
    registers: int
    spilled: int
    shared_memory: int
    warps: int
    bytes_ahead: int

    @property
    def programs(self) -> int:
        """Programs that one multiprocessor runs at a time."""
        threads = self.warps * self.device.target.warp_size
        registers = -(-self.registers // 8) * 8 * threads
        by_memory = self.device.shared_memory // (self.shared_memory + 1024)
        return min(self.device.registers // registers, self.device.threads // threads, by_memory, 32)

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of logits that a multiprocessor waits for while all its programs load."""
        return self.programs * self.bytes_ahead


def compile_for(variant: Variant, device: Device) -> Resources:
    """Compile a variant for a device that need not be there, with Triton's own assembler."""
    source, warps = variant.source(device)
    compiled = triton.compile(source, target=device.target, options={"num_warps": warps})
    if device.target.backend == "cuda":
        registers, spilled = _assemble(compiled.asm["ptx"], device.target.arch)
    else:
        counts = {name: int(n) for name, n in re.findall(r"\.(\w+_count):\s+(\d+)", compiled.asm["amdgcn"])}
        registers = counts["vgpr_count"]
        spilled = 4 * (counts["vgpr_spill_count"] + counts["sgpr_spill_count"])
    block = source.constants[(variant.kernel.arg_names.index("BLOCK"),)]
    names = variant.kernel.arg_names
    units = source.constants[(names.index("UNITS"),)] if "UNITS" in names else 1
    ahead = units * block * variant.dtype.itemsize * (2 if "q_logits" in names else 1)
    return Resources(device, registers, spilled, compiled.metadata.shared, warps, ahead)


def _assemble(ptx: str, architecture: int) -> tuple[int, int]:
    """Return registers a thread and bytes spilled, as ptxas reports them with the options that Triton gives it."""
    from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        name = f"--gpu-name={sm_arch_from_capability(architecture)}"
        command = [get_ptxas(architecture).path, "-v", "--regAllocOptLevel=2", name, file.name, "-o", "/dev/null"]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    registers = re.search(r"Used (\d+) registers", log)
    stores = re.search(r"(\d+) bytes spill stores", log)
    if registers is None or stores is None:
        raise RuntimeError(f"ptxas reported no registers or spills: {log}")
    return int(registers[1]), int(stores[1])


def spilling(variants: Sequence[Variant], targets: Sequence[str]) -> list[str]:
    """Return the rows of the table whose kernels spill registers."""
    return [line for line in [*table(variants, targets)][2:] if _spills(line)]


def _spills(line: str) -> bool:
    return "| 0 bytes |" not in line


def table(variants: Sequence[Variant], targets: Sequence[str]) -> Iterator[str]:
    """Yield the lines of a Markdown table with a row for each variant and target."""
    yield "| kernel | target | registers | spilled | programs | in flight | needed | bound |"
    yield "|---|---|---|---|---|---|---|---|"
    for variant, target in itertools.product(variants, targets):
        found = compile_for(variant, device := DEVICES[target])
        in_flight, needed = found.bytes_in_flight / 1024, device.bytes_needed / 1024
        bound = 1e3 * variant.bytes_moved() / device.bandwidth
        cells = (str(variant), target, str(found.registers), f"{found.spilled} bytes", str(found.programs))
        yield f"| {' | '.join(cells)} | {in_flight:.0f} KiB | {needed:.0f} KiB | {bound:.2f} ms |"


def main() -> int:
    """Print the table; return 1 if a kernel of a call that trains a policy spills registers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="every variant; else those of calls that train a policy")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16"])
    parser.add_argument("--targets", nargs="+", default=list(DEVICES), choices=list(DEVICES))
    parser.add_argument("--output", type=Path, help="write the table to this file instead")
    arguments = parser.parse_args()
    choose = all_variants if arguments.all else training_variants
    variants = [variant for name in arguments.dtypes for variant in choose(getattr(torch, name))]
    trained = {f"| {variant} |" for variant in training_variants(torch.bfloat16)}
    lines = []
    for line in table(variants, arguments.targets):
        if arguments.output is None:
            print(line, flush=True)
        lines.append(line)
    if arguments.output is not None:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text("\n".join([*lines, ""]))
        print(f"registers of {len(lines) - 2} kernels: {arguments.output}")
    spilling = [line for line in lines[2:] if line.startswith(tuple(trained)) and _spills(line)]
    print(*(f"spills: {line}" for line in spilling), sep="\n", end="")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
