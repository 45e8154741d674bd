"""Processes that run a user's code, rewards and environments: what misbehaves there ends neither driver nor engines."""
