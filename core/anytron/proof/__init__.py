"""What shows that a platform, an installation and a run are right: the kit, verification, doctor, planning."""
