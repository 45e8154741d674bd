"""Everything that differs between devices: hooks, loading of plugins, platforms, runtimes, patches."""
