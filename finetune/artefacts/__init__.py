"""What runs leave, put to use: found, opened, exported as something others open, and proved to be what was trained."""
