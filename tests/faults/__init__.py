"""Faults on purpose: what Looped does when disks, files, recipes or clients are not as they should be."""
