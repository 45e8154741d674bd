"""ms-swift's command on the layer, without this package's patches: run as alone.py sft OPTIONS."""

import sys

from anytron.device.layer import open_layer
from anytron.device.patches import Phase

if __name__ == "__main__":
    del sys.argv[1]
    with open_layer(engine="megatron") as layer:
        layer.apply_phase(Phase.BEFORE_PARALLEL_INIT)
        from swift.megatron import megatron_sft_main

        layer.apply_phase(Phase.BEFORE_BUILD)
        megatron_sft_main()
