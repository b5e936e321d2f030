"""Studying the expert cache: `vkmoe trace` records routing, `vkmoe simulate` replays it."""
