"""One step under fake tensors: what it allocates, without allocating it."""
