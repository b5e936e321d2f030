"""This package knows where the experts lie, and how they are reached."""
