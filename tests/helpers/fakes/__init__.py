"""Models, tokenizers, text, runs and a server, small enough for any test."""
