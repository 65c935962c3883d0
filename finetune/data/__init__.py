"""From sources to batches."""
