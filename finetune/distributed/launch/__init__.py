"""The launch plane: launch file, environment, what their keys mean, and the launcher."""
