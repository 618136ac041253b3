"""The SeqBoat layer, its parts and its ablations."""
