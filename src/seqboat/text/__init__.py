"""Reading, generating and scoring text with a language model."""
