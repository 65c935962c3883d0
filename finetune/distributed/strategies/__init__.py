"""The ways of holding a network over ranks, a module each; `strategy_of` finds the one that a launch asks for."""
