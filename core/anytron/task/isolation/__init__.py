"""Processes that run a user's code, rewards and environments; their failures end neither the driver nor engines."""
