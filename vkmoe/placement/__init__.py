"""Decides what lies where (plan, experts, sizes) and puts it there (loader, expert_memory)."""
