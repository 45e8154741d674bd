"""The aclnn entry points that the simulator has: their names and the types of their arguments.

The order is that of CANN's C interface, in which torch_npu's op-plugin passes them
(https://github.com/Ascend/op-plugin, op_plugin/ops/opapi). The two last parameters of every
``...GetWorkspaceSize`` (size and executor, both written) are left out.

T tensor, L tensor list, A array of int64, S scalar, d double, f float, i int64, t int32 (a dtype), b bool, s string.
"""

from __future__ import annotations

SIGNATURES: dict[str, str] = {
    # Primitives that torch_npu's C++ calls past the dispatcher.
    "aclnnInplaceFillScalar": "TS",
    "aclnnInplaceZero": "T",
    "aclnnInplaceOne": "T",
    "aclnnInplaceCopy": "TT",
    "aclnnCast": "TtT",
    "aclnnConstantPadNd": "TAST",
    # Fused attention: query, key, value, pse, drop_mask, padding_mask, atten_mask, prefix[, lengths], scale, keep_prob,
    # pre_tokens, next_tokens, head_num, layout, inner_precise, sparse_mode, softmax_max, softmax_sum, softmax_out, out.
    "aclnnFlashAttentionScore": "TTTTTTTA" + "ddiiisii" + "TTTT",
    "aclnnFlashAttentionVarLenScore": "TTTTTTTAAA" + "ddiiisii" + "TTTT",
    # query, key, value, dy, pse, drop_mask, padding_mask, atten_mask, softmax_max, softmax_sum, softmax_in,
    # attention_in, prefix[, lengths], the same attributes, dq, dk, dv, dpse.
    "aclnnFlashAttentionScoreGrad": "TTTTTTTTTTTTA" + "ddiiisii" + "TTTT",
    "aclnnFlashAttentionUnpaddingScoreGrad": "TTTTTTTTTTTTAAA" + "ddiiisii" + "TTTT",
    # The same with sinks: the sink after atten_mask, q_start and kv_start after prefix and lengths, pse_type after
    # sparse_mode; in TND query_rope after query, key_rope after key, and softmax_layout after pse_type.
    "aclnnFlashAttentionScoreV3": "TTTTTTTTAAA" + "ddiiisiii" + "TTTT",
    "aclnnFlashAttentionVarLenScoreV5": "TTTTTTTTTTAAAAA" + "ddiiisiiis" + "TTTT",
    # Backward: the sink after attention_in; dsink at the end, and in TND dq_rope and dk_rope after dq and dk.
    "aclnnFlashAttentionScoreGradV3": "TTTTTTTTTTTTTAAA" + "ddiiisiii" + "TTTTT",
    "aclnnFlashAttentionUnpaddingScoreGradV5": "TTTTTTTTTTTTTTTAAAAA" + "ddiiisiiis" + "TTTTTTT",
    # shape, prob, seed, offset, prob_dtype, out
    "aclnnDropoutGenMaskV2": "AdiitT",
    # x, gamma, epsilon, y, rstd
    "aclnnRmsNorm": "TTdTT",
    # dy, x, rstd, gamma, dx, dgamma
    "aclnnRmsNormGrad": "TTTTTT",
    # x, dim, y
    "aclnnSwiGlu": "TiT",
    # dy, x, dim, dx
    "aclnnSwiGluGrad": "TTiT",
    # x, cos, sin, mode, y
    "aclnnRotaryPositionEmbedding": "TTTiT",
    # dy, cos, sin, x, mode, dx, dcos, dsin
    "aclnnRotaryPositionEmbeddingGrad": "TTTTiTTT",
    # x, weight, bias, scale, offset, antiquant_scale, antiquant_offset, per_token_scale, group_list, activation_input,
    # activation_quant_scale, activation_quant_offset, split_item, group_type, group_list_type, act_type,
    # y, activation_feature_out, dynamic_quant_scale_out
    "aclnnGroupedMatmulV4": "LLLLLLLLTLLLiiiiLLL",
    # tokens, indices, num_out_tokens, padded_mode, permuted_tokens, sorted_indices
    "aclnnMoeTokenPermute": "TTibTT",
    # permuted_tokens_grad, sorted_indices, top_k, padded_mode, tokens_grad
    "aclnnMoeTokenPermuteGrad": "TTibT",
    # permuted_tokens, sorted_indices, probs, padded_mode, restore_shape, tokens
    "aclnnMoeTokenUnpermute": "TTTbAT",
    # permuted_tokens, tokens_grad, sorted_indices, probs, padded_mode, restore_shape, permuted_tokens_grad, probs_grad
    "aclnnMoeTokenUnpermuteGrad": "TTTTbATT",
    # tokens, routing_map, probs, num_out_tokens, drop_and_pad, permuted_tokens, permuted_probs, sorted_indices
    "aclnnMoeTokenPermuteWithRoutingMap": "TTTibTTT",
    # permuted_tokens_grad, permuted_probs_grad, sorted_indices, routing_map, experts, tokens, drop_and_pad,
    # tokens_grad, probs_grad
    "aclnnMoeTokenPermuteWithRoutingMapGrad": "TTTTiibTT",
    # permuted_tokens, sorted_indices, routing_map, probs, drop_and_pad, restore_shape, tokens, out_index,
    # permuted_token_id, permuted_probs
    "aclnnMoeTokenUnpermuteWithRoutingMap": "TTTTbATTTT",
    # tokens_grad, out_index, permuted_token_id, routing_map, permuted_tokens, probs, drop_and_pad, restore_shape,
    # permuted_tokens_grad, probs_grad
    "aclnnMoeTokenUnpermuteWithRoutingMapGrad": "TTTTTTbATT",
    # param, exp_avg, exp_avg_sq, max_exp_avg_sq, grad, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize
    "aclnnApplyAdamWV2": "TTTTTTfffffbb",
}
