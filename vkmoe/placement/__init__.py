"""Decides what lies where (planner, sizes, host) and puts it there (loader)."""
