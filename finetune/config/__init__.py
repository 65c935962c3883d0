"""The recipe: its schema, its values, and where they come from."""
