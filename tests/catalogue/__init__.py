"""Tests of what is shown of experts, changed about them, and said about time."""
