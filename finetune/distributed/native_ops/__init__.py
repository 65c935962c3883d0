"""DeepSpeed's native ops, compiled on the machine that runs them."""
