"""Tests of vkmoe/cpu."""
