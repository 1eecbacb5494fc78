"""How a chain is asked for: who takes part, which steps."""
