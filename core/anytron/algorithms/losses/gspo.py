"""Group sequence policy optimization (arXiv:2507.18071): the ratio of a whole response, not of each token."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anytron.algorithms.losses.ppo_clip import clipped

if TYPE_CHECKING:
    from anytron.algorithms.contract import PolicyTokens, TokenLosses
    from anytron.config.schema import AlgorithmSection


def gspo(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip by the geometric mean of a response's ratios. ``algorithm.loss=gspo``.

    With ``s_i = (p(y_i) / p_old(y_i))^(1 / |y_i|)`` a response costs (eq. 5 to 7)::

        -min(s_i * A, clip(s_i, 1 - clip_low, 1 + clip_high) * A)

    Each of its tokens has that loss, so that ``aggregation=sequence-mean`` is the paper's mean over responses. Its
    bounds are small: 3e-4 and 4e-4 in section 5.1.
    """
    ratio = tokens.sequence_mean(tokens.log_ratio()).exp()
    return clipped(tokens.to_tokens(ratio), tokens.advantages, algorithm)


def gspo_token(tokens: PolicyTokens, algorithm: AlgorithmSection) -> TokenLosses:
    """Clip by the response's ratio, and let the gradient be each token's own. ``algorithm.loss=gspo_token``.

    The ratio is ``sg(s_i) * p / sg(p)``, with ``sg`` stopping the gradient (eq. 13 and 14): its value is that of
    :func:`gspo`, and tokens of one response may have different advantages. Where they have the same, and
    ``aggregation=sequence-mean``, both have the same gradient.
    """
    mean = tokens.sequence_mean(tokens.log_ratio().detach())
    own = (tokens.log_probs - tokens.log_probs.detach()).exp()
    return clipped(tokens.to_tokens(mean.exp()) * own, tokens.advantages, algorithm)
