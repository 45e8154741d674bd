"""What MindSpeed-LLM does to a process, and that the engine catches it: one line for each.

Runs in one process with a real MindSpeed-LLM and without process groups.
"""

import sys

import torch
from transformers import Qwen3Config, Qwen3MoeConfig

from anytron.base.errors import ConfigError, EngineError
from anytron.config.schema import RunConfig
from anytron.device.hooks.types import PatchContext
from anytron.device.loading import open_session
from anytron.device.patches import Ledger, Patch, Phase
from anytron.sequences.layout import LayoutConstraints
from anytron.sequences.planning import plan_layout
from anytron_ascend.mindspeed_llm.arguments import translate
from anytron_ascend.mindspeed_llm.options import MindSpeedLlmOptions
from anytron_ascend.mindspeed_llm.process_state import (
    install_arguments,
    layer_specification,
    scope_of,
    uninstall_arguments,
)

sys.argv += ["--num-layers", "4", "--a-typo", "1"]  # of this process, none of MindSpeed-LLM's business

SIZES = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
}  # fmt: skip
DENSE = Qwen3Config(**SIZES)
SPARSE = Qwen3MoeConfig(**SIZES, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2)

session = open_session("ascend", engine="mindspeed_llm")
context = PatchContext(session.platform, "trainer", session.hooks, "mindspeed_llm")
ledger = Ledger(context=context)


def arguments(model=DENSE, **options):
    sections = {"model": {"path": "x", "dtype": "float32"}, "data": {"source": "x"}, "rewards": [{"function": "x"}]}
    config = RunConfig.model_validate(sections)
    options = {"model": {"fused_rotary_embedding": False}, "moe": {"grouped_gemm": False}, **options}
    return translate(config, model, MindSpeedLlmOptions.model_validate(options))


def check(name, holds):
    print("caught" if holds else "MISSED", name, flush=True)


def refused(error, action):
    try:
        action()
    except error as caught:
        return str(caught)
    return ""


ledger.apply(Phase.BEFORE_IMPORT, session.hooks.patch_model(Phase.BEFORE_IMPORT, context))
from mindspeed.model import transformer  # noqa: E402
from mindspeed_llm.core.models.gpt import gpt_model  # noqa: E402
from mindspeed_llm.training import utils  # noqa: E402

(record,) = [record for record in ledger.records if record.patch.id == "ascend.mindspeed-llm"]
check("versions recorded before MindSpeed answers for them", "megatron-core 0.12.1" in record.detail)

# Sequences of one token end the list.
ends = torch.tensor([3, 4, 5, 9, 14])
joined = gpt_model.recompute_valid_actual_seq_len(ends, 1)
check("the hazard is there: sequences are joined", joined.tolist() == [3, 14])
ledger.apply(Phase.BEFORE_PARALLEL_INIT)
ledger.apply(Phase.BEFORE_BUILD, session.platform.patch_model(Phase.BEFORE_BUILD, context))
check("sequences stay apart", gpt_model.recompute_valid_actual_seq_len(ends, 1).equal(ends))

# The command line of the process is not MindSpeed-LLM's.
first = install_arguments(arguments(recompute={"activation_function": True}), ledger)
check("sys.argv", first.num_layers == 2 and not hasattr(first, "a_typo") and len(sys.argv) > 1)

# One set of arguments in a process.
install_arguments(arguments(recompute={"activation_function": True}), ledger)
check("a second engine with the same arguments", True)
text = refused(EngineError, lambda: install_arguments(arguments(), ledger))
check("a second engine with others", "recompute_activation_function" in text)
uninstall_arguments()
text = refused(EngineError, lambda: install_arguments(arguments(), ledger))
check("others beside one that is left", "recompute_activation_function" in text)
uninstall_arguments()
second = install_arguments(arguments(), ledger)
check("arguments of a closed engine", second is not first and not second.recompute_activation_function)

# What follows from the arguments when a module is imported.
dense = layer_specification().submodules.mlp.module.__name__
uninstall_arguments()
install_arguments(arguments(SPARSE), ledger)
from mindspeed_llm.tasks.models.spec import qwen3_spec  # noqa: E402

check(
    "the hazard is there: the layer of the engine before", qwen3_spec.layer_spec.submodules.mlp.module.__name__ == dense
)
check("each engine its layers", (dense, layer_specification().submodules.mlp.module.__name__) == ("MLP", "MoELayer"))

# Lengths and masks of passes.
utils._ACTUAL_SEQ_LEN_LIST = [7]
layout = plan_layout(torch.tensor([3, 5]), format="thd", constraints=LayoutConstraints())
with scope_of(layout)():
    inside = utils.get_actual_seq_len_list()
check("lengths of a micro-batch", (inside, utils.get_actual_seq_len_list()) == ([3, 8], [7]))
transformer.set_attention_mask(torch.ones(1))
uninstall_arguments()
third = install_arguments(arguments(), ledger)
check("lengths of the engine before", utils.get_actual_seq_len_list() is None)
check("the mask of the engine before", transformer._GLOBAL_ATTN_MASK is None)

# Names that MindSpeed-LLM would take in silence.
uninstall_arguments()
text = refused(ConfigError, lambda: install_arguments(arguments(arguments={"swap_attn": True}), ledger))
check("a typo", "did you mean swap_attention" in text)
wrong = {"recompute": {"activation_function": True}, "arguments": {"recompute_activation_function_num_layers": -1}}
text = refused(EngineError, lambda: install_arguments(arguments(**wrong), ledger))
check("arguments that it refuses", "--recompute-activation-function-num-layers cannot be less than 0" in text)


# Repatching starts from the objects that MindSpeed saw first.
def wrapping(original):
    def wrapped(*args, **kwargs):
        return original(*args, **kwargs)

    wrapped.of_the_test = True
    return wrapped


TARGET = "megatron.core.transformer.transformer_layer:TransformerLayer.forward"
ledger.apply(
    Phase.AFTER_BUILD,
    [Patch("test.layer", TARGET, Phase.AFTER_BUILD, "a test", replacement="__main__:wrapping")],
)
install_arguments(arguments(SPARSE), ledger)
from megatron.core.transformer.transformer_layer import TransformerLayer  # noqa: E402

check("patches of the ledger survive", hasattr(TransformerLayer.forward, "of_the_test") and ledger.verify() == [])
