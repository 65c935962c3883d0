"""What a run would take, before it is launched: memory, time, traffic and cost, under every launch file.

Nothing is loaded: networks are built on the meta device, and everything else is arithmetic.
"""
