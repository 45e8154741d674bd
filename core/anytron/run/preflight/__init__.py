"""From a YAML file to a run that may start: everything that can be wrong is found here."""
