"""Program: compile the kernels for GPUs that are not there; print what each would take, as JSON.

python compile_for.py COMPUTE_CAPABILITY ... (90 is 9.0)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from anytron_cuda.log_probs.kernels import differentiate, sum_up
from anytron_cuda.log_probs.triton_tiles import Blocks

OPERANDS = dict.fromkeys(("hidden", "weight", "grads"), "*bf16")
STATISTICS = ("statistics", "peaks", "log_totals", "means", "grad_log_probs", "grad_entropies")
TYPES = {**OPERANDS, **dict.fromkeys(STATISTICS, "*fp32"), "labels": "*i64", "factor": "fp32"}
MULTIPLES_OF_16 = {*OPERANDS, *STATISTICS, "labels", "entries", "hidden_size"}
"""What Triton may rely on in a usual call: addresses, and sizes that are no numbers of tokens."""


def compiled(kernel, capability):
    """What a program of this kernel takes: bytes of shared memory, registers of a thread, bytes that they spill."""
    blocks = Blocks()
    sizes = {"block_n": blocks.tokens, "block_v": blocks.entries, "block_h": blocks.inner}
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in sizes else TYPES.get(name, "i32") for name in names},
        constexprs=sizes,
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in names if name in MULTIPLES_OF_16},
    )
    options = {"num_warps": blocks.warps, "num_stages": blocks.stages}
    made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    words = made.asm["ptx"]
    architecture = re.search(r"\.target (\w+)", words)[1]
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "kernel.ptx").write_text(words)
        # The assembler that Triton took already, once more: this one says what it did.
        assembler = [triton.knobs.nvidia.ptxas_blackwell.path, "-v", f"--gpu-name={architecture}", "kernel.ptx"]
        said = subprocess.run(assembler, cwd=folder, capture_output=True, text=True, check=True).stderr
    return {
        "shared_bytes": made.metadata.shared,
        "registers": int(re.search(r"Used (\d+) registers", said)[1]),
        "spilled_bytes": int(re.search(r"(\d+) bytes spill stores", said)[1]),
    }


def main():
    kernels = {"sum_up": sum_up, "differentiate": differentiate}
    made = {
        capability: {name: compiled(kernel, int(capability)) for name, kernel in kernels.items()}
        for capability in sys.argv[1:]
    }
    print(json.dumps(made))


if __name__ == "__main__":
    main()
