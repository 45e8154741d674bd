"""What this engine adds to the metrics of a step."""

from __future__ import annotations

from anytron.base.metric import Metric

_EXPERTS = "the coefficient of that loss is set ([experts](../how-to/train-mixture-of-experts.md))"

METRICS = (
    Metric("moe/load_balancing_loss", "", "load-balancing loss, mean over layers, 1 = perfect balance", _EXPERTS),
    Metric("moe/seq_load_balancing_loss", "", "the same, computed for each sequence", _EXPERTS),
    Metric("moe/z_loss", "", "z-loss of the routers, mean over layers", _EXPERTS),
    Metric(
        "moe/rerouted_fraction",
        "fraction",
        "tokens that predict a response token, over all layers, whose router would have chosen other experts",
        "`engine.options.router_replay` or `rollout.replay_routing`",
    ),
    Metric(
        "mtp/loss",
        "nats",
        "loss of the multi-token prediction modules, mean over depths, without its coefficient",
        "`engine.options.mtp_loss_coefficient` is above 0",
    ),
    Metric("critic/moe/NAME", "", "the same losses of the critic's routers", "a critic with experts"),
)
