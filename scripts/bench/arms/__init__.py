"""One file for each loop that is compared."""
