"""Trained weights put to use: found, merged, written, verified, opened."""
