"""The critic of PPO: a model with a value head."""
