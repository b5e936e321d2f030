"""Tests of what a user may call a model, and of the caches that names are looked up in."""
