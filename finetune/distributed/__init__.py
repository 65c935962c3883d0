"""Where the run happens: with `planning`, the only package that knows one backend from another."""
