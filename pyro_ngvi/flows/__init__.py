"""Normalizing flows of other libraries, in one form."""
