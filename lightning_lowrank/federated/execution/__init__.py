"""How a round's clients are run: one after another, stacked, or on several processes."""
