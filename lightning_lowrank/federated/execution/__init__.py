"""Executions of a round's clients: one after another, together as a stack, or on several processes."""
