"""Turn a YAML file into a run that may start: all checks that run before the first step."""
