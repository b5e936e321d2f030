"""Holds the models of a server: which there are, which of them is loaded, and what peers have."""
