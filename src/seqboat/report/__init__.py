"""Runs as HTML pages."""
