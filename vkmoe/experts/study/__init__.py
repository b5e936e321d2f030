"""Replays recorded routing and measures it, to learn what a cache would do; needs no GPU."""
