"""Reads the description of a model from its file: a module for each family, differences only."""
