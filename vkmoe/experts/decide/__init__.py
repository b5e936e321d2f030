"""Decides which experts should be where, from what the tokens used; knows no bytes."""
