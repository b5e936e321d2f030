"""Decides what lies where (planner) and puts it there (loader)."""
