"""What a run would take, before it is launched: memory, time, traffic and cost, under every launch file."""
