"""The run's configuration: schema, reading, checks."""
