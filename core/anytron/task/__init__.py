"""What a model learns from: data, rewards, environments, and the confinement that they run in."""
