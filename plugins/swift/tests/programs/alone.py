"""ms-swift's command on the stack, without this package's patches: run as alone.py sft OPTIONS."""

import sys

from anytron.device.patches import Phase
from anytron.device.stack import open_device_stack

if __name__ == "__main__":
    del sys.argv[1]
    with open_device_stack(engine="megatron") as stack:
        stack.apply_phase(Phase.BEFORE_PARALLEL_INIT)
        from swift.megatron import megatron_sft_main

        stack.apply_phase(Phase.BEFORE_BUILD)
        megatron_sft_main()
