"""The language model engine and its server."""
