"""Decides what lies where, by what that costs, and puts it there (loader, expert_memory)."""
