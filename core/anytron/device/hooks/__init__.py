"""The hooks, through which plugins adapt the core to a device: specifications, types, calls and facade."""
