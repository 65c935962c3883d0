"""The built-in data."""
