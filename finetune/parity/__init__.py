"""One recipe under many launch configs, and one verdict; the same for two runs that have ended."""
