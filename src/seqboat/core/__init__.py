"""The mechanism: which tokens a module sees, who decides, and what limits the decision."""
