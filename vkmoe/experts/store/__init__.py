"""Holds the bytes of experts and moves them: slots, address table, copies, host pool, cache."""
