"""What each platform answers lets through the pairs of the definition, on real rows, and no padding."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anytron.base.errors import HookContractError
from anytron.base.traits import ModelTraits, ParallelSizes
from anytron.device.loading import hooks_of
from anytron.kernels.oracles.masks import defined_pairs, read_transformer_engine
from anytron.sequences.layout import ContextShard, LayoutConstraints
from anytron.sequences.masks import MaskKind, MaskRequest
from anytron.sequences.planning import plan_layout
from anytron_cpu import CpuPlatform

# The forms that models take: mcore-bridge's GPT (thd, bshd), models that pack inside by the map, any.
ACCEPTED = [
    {MaskKind.NONE},
    {MaskKind.NONE, MaskKind.FULL_4D},
    {MaskKind.PADDING_2D},
    {MaskKind.FULL_4D},
    set(MaskKind),
]

traits = st.builds(
    ModelTraits,
    causal=st.booleans(),
    vision=st.booleans(),
    latent_attention=st.booleans(),
    linear_attention=st.booleans(),
    mixture_of_experts=st.booleans(),
    window=st.sampled_from([None, (0, 0), (2, 0), (2, 1), (-1, 1), (3, -1)]),
)


def plan(lengths, format, cp, traits, accepted):
    """All shards' layouts, as an engine plans them for such a model."""
    packs_inside = format == "thd" and MaskKind.NONE not in accepted
    input_layout = "rows" if packs_inside else "whole" if traits.vision else "shard"
    return [
        plan_layout(
            lengths,
            format=format,
            tensor_parallel=2,
            shard=ContextShard(cp, rank),
            constraints=LayoutConstraints(align=3),
            input_layout=input_layout,
        )
        for rank in range(cp)
    ]


def exact_kinds(format, cp, causal):
    """Which forms can be exact at all: the reasons stand in the neutral default."""
    exact = set()
    if format == "thd" or causal:
        exact |= {MaskKind.NONE, MaskKind.PADDING_2D}
    if format == "bshd" and cp == 1:
        exact |= {MaskKind.PADDING_2D, MaskKind.FULL_4D}
    return exact


# Asked is the whole facade, on the processor. Its attention has Transformer Engine's interface
# (portable or not), whose words the neutral default speaks.
@settings(deadline=None, max_examples=100)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    format=st.sampled_from(["thd", "bshd"]),
    cp=st.sampled_from([1, 2, 4]),
    traits=traits,
    accepted=st.sampled_from(ACCEPTED),
)
def test_the_pairs_are_those_of_the_definition(lengths, format, cp, traits, accepted):
    hooks = hooks_of(CpuPlatform())
    parallel = ParallelSizes(tensor=2, context=cp)
    at_build = MaskRequest(format, traits, parallel, frozenset(accepted))
    if not exact_kinds(format, cp, traits.causal) & accepted:
        with pytest.raises(HookContractError, match="cannot build a mask that this model accepts") as refusal:
            hooks.build_attn_mask(at_build)
        assert "kinds of masks that describe this attention" in refusal.value.why
        return
    built = hooks.build_attn_mask(at_build)
    layouts = plan(lengths, format, cp, traits, accepted)
    for layout in layouts:
        request = MaskRequest(format, traits, parallel, frozenset(accepted), layout)
        mask = hooks.build_attn_mask(request, built)
        assert read_transformer_engine(mask, layouts, traits) == defined_pairs(lengths, traits)
        if traits.linear_attention:
            assert mask.linear_attn_mask.sum(1).tolist() == lengths
        if traits.mixture_of_experts:
            assert (mask.padding_mask == (layout.token_index == sum(lengths)).view(layout.shape)).all()


@pytest.mark.parametrize("format", ["thd", "bshd"])
@pytest.mark.parametrize("cp", [1, 2, 4])
@pytest.mark.parametrize(
    "traits",
    [
        ModelTraits(),
        ModelTraits(vision=True),
        ModelTraits(linear_attention=True),
        ModelTraits(latent_attention=True),
        ModelTraits(vision=True, linear_attention=True),
    ],
    ids=["text", "vision", "delta-net", "latent", "vision and delta-net"],
)
def test_no_causal_model_needs_a_square_mask(format, cp, traits):
    """``[B, 1, S, S]`` grows with the square of the length; it is for models that take nothing else."""
    for accepted in ACCEPTED:
        if accepted == {MaskKind.FULL_4D}:
            continue
        request = MaskRequest(format, traits, ParallelSizes(context=cp), frozenset(accepted))
        answer = hooks_of().build_attn_mask(request)
        assert answer.kind is (MaskKind.NONE if MaskKind.NONE in accepted else MaskKind.PADDING_2D)
