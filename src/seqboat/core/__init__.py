"""The mechanism: which tokens a module sees, what decides, and what limits the decision."""
