"""What a run keeps besides weights: its folder, and how far it is."""
