"""Documents to token files."""
