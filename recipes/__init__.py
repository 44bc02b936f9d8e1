"""Recipes, installed as `tfidf_tune.recipes`: `tune run tfidf_tune/recipes/full_finetune.py --config ...`."""
