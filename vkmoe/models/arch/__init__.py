"""Reads the description of a model from its file: one module per architecture, differences only."""
