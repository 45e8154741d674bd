"""Checks of a platform, an installation and a run before training: the kit, verification, doctor, planning."""
