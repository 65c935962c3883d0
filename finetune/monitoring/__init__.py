"""What is watched while a run goes: metrics, time, requests to stop, steps that are not finite."""
