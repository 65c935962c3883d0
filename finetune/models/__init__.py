"""Networks: configurations, weights, adapters, quantization, attention, losses."""
