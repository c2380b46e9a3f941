"""Inputs that come with a request: bodies, pictures, links, uploads."""
