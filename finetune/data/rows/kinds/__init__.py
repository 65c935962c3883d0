"""Kinds of rows, one module each."""
