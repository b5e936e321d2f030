"""Tests of vkmoe/generate/tools."""
