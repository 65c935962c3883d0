"""Token files to batches."""
