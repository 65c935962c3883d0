"""Predicts memory, time, traffic and cost of a run under every launch file, before it is launched."""
