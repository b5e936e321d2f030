"""Decides what lies where, by what that costs."""
