"""What users run beside training: doctor, explain, parity, replay."""
