"""Token weightings in the Trainer of transformers."""

__all__: list[str] = []
