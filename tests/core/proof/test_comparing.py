"""The first difference of two traces, and how its place is described."""

import torch

from anytron.proof.comparing import first_difference, place_of, title
from anytron.sequences.batch import RaggedBatch
from anytron.workers.engines.tracing import LOG_PROB, Trace, TracedTensor


def tensor(name, digests, kind="output", stage=0, computed=None, width=4):
    computed = [True] * len(digests) if computed is None else computed
    return TracedTensor(name, kind, stage, width, torch.tensor(digests), torch.tensor(computed))


def trace(*tensors):
    return Trace(tensors, None)


SAME = trace(tensor("norm", [1, 2, 3]), tensor("mlp", [4, 5, 6]), tensor(LOG_PROB, [7, 8, 9], stage=9))


def test_equal_digests_are_no_difference():
    assert first_difference([SAME], [SAME]) is None


def test_the_first_tensor_in_the_order_of_computation_wins_over_the_first_token():
    found = trace(tensor(LOG_PROB, [0, 0, 9], stage=9), tensor("mlp", [0, 5, 0]), tensor("norm", [1, 2, 0]))
    first = first_difference([found], [SAME])
    assert (first.tensor.key, first.token, first.tokens, first.tensors) == (("norm", "output"), 2, 1, 3)


def test_a_token_that_only_one_pass_computed_is_left_out():
    found = trace(tensor("norm", [0, 2, 3], computed=[False, True, True]), tensor("unknown", [0, 0, 0]))
    assert first_difference([found], [SAME]) is None


def test_tensors_of_two_widths_are_two_tensors():
    assert first_difference([trace(tensor("norm", [0, 2, 3], width=5))], [SAME]) is None


def test_earlier_stages_come_first_whatever_their_rank():
    late, early = trace(tensor("layers.1", [1, 2], stage=1)), trace(tensor("layers.0", [3, 4], stage=0))
    broken = [trace(tensor("layers.1", [0, 2], stage=1)), trace(tensor("layers.0", [3, 0], stage=0))]
    first = first_difference(broken, [late, early])
    assert (first.rank, first.tensor.name, first.token) == (1, "layers.0", 1)


def test_input_and_output_of_a_module_are_two_tensors():
    mine = trace(tensor("mlp", [1], kind="input"), tensor("mlp", [2]))
    theirs = trace(tensor("mlp", [1], kind="input"), tensor("mlp", [3]))
    assert first_difference([mine], [theirs]).tensor.kind == "output"


def test_places_are_counted_from_1():
    batch = RaggedBatch(
        torch.tensor([3, 4]), torch.arange(20, 27), torch.tensor([0, 0, 1, 0, 0, 1, 1], dtype=torch.bool)
    )
    assert place_of(batch, 2) == "token 22 (number 1 of the response; number 3 of sequence 1)"
    assert place_of(batch, 4) == "token 24 (in the prompt; number 2 of sequence 2)"
    assert place_of(batch, 6) == "token 26 (number 2 of the response; number 4 of sequence 2)"


def test_a_module_of_a_layer_is_named_with_it():
    assert title("decoder.layers.11.mlp", "input") == "layer 11: input of decoder.layers.11.mlp"
    assert title("decoder.final_layernorm", "output") == "output of decoder.final_layernorm"
    assert title(LOG_PROB, "output").startswith("the log-probs")
