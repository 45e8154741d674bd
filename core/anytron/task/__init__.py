"""What a model learns from: data, rewards, environments, and the confined processes in which they run."""
