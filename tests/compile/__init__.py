"""Kernels compiled for devices that are not there: do they compile, do they fit, did they grow."""
