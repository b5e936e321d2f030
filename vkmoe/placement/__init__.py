"""Decides what lies where, by what that costs, and takes the memory that experts move in."""
