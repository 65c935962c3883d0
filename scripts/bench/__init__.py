"""The benchmark against peers: what `scripts/benchmark.py` runs."""
