"""Configs, installed as `tfidf_tune.configs`; `tfidf-tune ls` shows their names."""
