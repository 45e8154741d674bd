"""The transfer of weights from training ranks to rollout processes."""
