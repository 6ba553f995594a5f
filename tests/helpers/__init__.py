"""Helpers of tests of several rooms."""
