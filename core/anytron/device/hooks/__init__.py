"""The contract between the core and its plugins: markers, specifications, defaults, facade."""
