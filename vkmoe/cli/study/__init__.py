"""This package studies the expert cache: `vkmoe trace` records, `vkmoe simulate` replays."""
