"""The ways of holding a network over ranks, a module each."""
