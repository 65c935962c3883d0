"""Trained state, one tensor at a time, from any backend to any other."""
