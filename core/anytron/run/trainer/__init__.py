"""The RL loop, and the protocols of what it is composed of."""
