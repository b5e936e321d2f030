"""This package holds the commands about the expert cache: traces, their replays, its settings."""
