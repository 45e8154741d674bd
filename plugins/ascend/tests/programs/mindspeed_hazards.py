"""What MindSpeed does to a process, and that the adaptor catches it: one line for each.

Runs in one process with a real MindSpeed and without process groups.
"""

import sys
from types import SimpleNamespace

from anytron.base.errors import PatchError
from anytron.base.traits import ParallelSizes
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Patch, Phase
from anytron.device.platform import EngineFacts
from anytron_ascend.mindspeed.patches import take_arguments
from anytron_ascend.mindspeed.process_state import default_arguments, engine_arguments, repatch
from anytron_ascend.options import MindSpeedOptions

sys.argv += ["--context-parallel-size", "4", "--a-typo", "1"]  # of this process, none of MindSpeed's business

session = open_session(platform="ascend", options={"adaptor": "mindspeed"})
context = PatchContext(session.platform, "trainer", session.hooks, "megatron")
ledger = Ledger(context=context)


def arguments(**sizes):
    return engine_arguments(default_arguments(), ParallelSizes(**sizes), MindSpeedOptions())


def check(name, holds):
    print("caught" if holds else "MISSED", name, flush=True)


ledger.apply(Phase.BEFORE_IMPORT, session.hooks.patch_model(Phase.BEFORE_IMPORT, context))

from importlib import metadata  # noqa: E402

from megatron.core import parallel_state  # noqa: E402
from megatron.core.ssm import gated_delta_net  # noqa: E402
from megatron.core.transformer.dot_product_attention import DotProductAttention  # noqa: E402
from mindspeed import utils  # noqa: E402
from mindspeed.args_utils import get_full_args  # noqa: E402
from mindspeed.core.context_parallel import get_batch_utils  # noqa: E402

# importlib.metadata.version answers for a Transformer Engine that is not there.
(record,) = [record for record in ledger.records if record.patch.id == "ascend.mindspeed"]
check("versions recorded before MindSpeed answers for them", "megatron-core 0.16." in record.detail)
check("the hazard is there: a made-up version", metadata.version("transformer-engine") == "2.2.0")

# The command line of the process is not MindSpeed's.
check("sys.argv", not hasattr(get_full_args(), "a_typo") and len(sys.argv) > 1)

# Two globals of one name.
utils.set_actual_seq_len([1])
check("the hazard is there: two globals", get_batch_utils.get_actual_seq_len() is None)
utils.set_actual_seq_len(None)

# Arguments stay from one engine to the next.
plain = parallel_state.initialize_model_parallel
layer = gated_delta_net.GatedDeltaNet
session.platform.prepare_engine(EngineFacts(ParallelSizes(context=2)), ledger)
get_full_args().left_behind = True
check("context parallelism patches process groups", parallel_state.initialize_model_parallel is not plain)
check("mcore-bridge's Gated DeltaNet keeps its parent", gated_delta_net.GatedDeltaNet is layer)
session.platform.prepare_engine(EngineFacts(), ledger)
left = vars(get_full_args())
check("sticky arguments", left["context_parallel_size"] == 1 and "left_behind" not in left)
check("sticky patches", parallel_state.initialize_model_parallel is plain)

# Arguments go into the config of every model, and some have the name of what an engine has set there.
check("the hazard is there: pipeline stages do not tell each other shapes", not get_full_args().variable_seq_lengths)
config = SimpleNamespace(variable_seq_lengths=True)
take_arguments(print)(config)
check("a model's config keeps what is Megatron's", config.variable_seq_lengths and config.sparse_mode == 2)


# Repatching starts from the objects that MindSpeed saw first.
def wrapping(original):
    def wrapped(*args, **kwargs):
        return original(*args, **kwargs)

    wrapped.of_the_test = True
    return wrapped


def patch_of(name, target):
    return Patch(name, target, Phase.BEFORE_PARALLEL_INIT, "a test", replacement="__main__:wrapping")


KEPT = "megatron.core.transformer.torch_norm:WrappedTorchNorm"
INIT = "megatron.core.parallel_state:initialize_model_parallel"
ledger.apply(Phase.BEFORE_PARALLEL_INIT, [patch_of("test.kept", KEPT), patch_of("test.init", INIT)])


def of_the_test():
    from megatron.core.transformer import torch_norm

    return [
        hasattr(holder, "of_the_test")
        for holder in (torch_norm.WrappedTorchNorm, parallel_state.initialize_model_parallel)
    ]


from mindspeed.megatron_adaptor import repatch as unguarded  # noqa: E402

unguarded({"context_parallel_size": 2, "gated_delta_net": True})
check("the hazard is there: another Gated DeltaNet", gated_delta_net.GatedDeltaNet is not layer)
check("the hazard is there: patches are dropped", of_the_test() != [True, True])
ledger.revalidate()
repatch(arguments(), ledger)
check("patches of the ledger survive", of_the_test() == [True, True])
check("the ledger says so", ledger.verify() == [])
check("an engine like the one before changes nothing", not repatch(arguments(), ledger))

# What nobody recorded cannot be done again.
DotProductAttention.forward = wrapping(DotProductAttention.forward)
try:
    repatch(arguments(context=2), ledger)
except PatchError as error:
    check("changes that are in no ledger", "DotProductAttention" in error.where)
else:
    check("changes that are in no ledger", False)
