"""Recipes, commands, ranks and a browser, started as processes or forked from one that has the
imports.
"""
