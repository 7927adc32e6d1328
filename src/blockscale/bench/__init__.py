"""Measuring products on a GPU: nothing is timed before it has been found right, and nothing degrades in silence."""
