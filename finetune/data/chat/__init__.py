"""Conversations to tokens with a loss mask."""
