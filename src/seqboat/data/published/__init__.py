"""Files of the published implementations: dictionaries, binarized token sequences, pixels as text."""
