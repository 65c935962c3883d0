"""Checkpoints with one layout, written and read by every backend on any number of processes; the run directory."""
