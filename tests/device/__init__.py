"""Tests that need a GPU: sizes beyond 32 bits, graphs, torch.compile, kernel caches, every configuration alone."""
