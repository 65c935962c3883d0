"""Watches a run while it goes: metrics, time, requests to stop, steps that are not finite."""
