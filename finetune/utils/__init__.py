"""Utilities that every package uses: files, errors, exit codes, access to the hub."""
