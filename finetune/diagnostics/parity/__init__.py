"""`finetune parity`: one recipe under many launch configs, and one verdict; the same for two finished runs."""
