"""An accelerator that does not exist, as a vendor's package would add it to torch: ``torch_invented``.

It differs from the host in what often goes unnoticed on a host: its memory cannot be read there, there are two devices,
a stream works only when something waits for it, every device has random numbers of its own; and it has no collectives
and no float64. :func:`tests.invented_device.build.installed` builds and installs it.
"""
