"""Commands beside training: doctor, explain, parity, replay, report, watch, runs."""
