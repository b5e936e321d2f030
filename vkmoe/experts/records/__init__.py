"""Counts what experts and copies did, and writes it down; decides nothing and moves nothing."""
