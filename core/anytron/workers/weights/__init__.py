"""The way of weights from training ranks to rollout processes."""
