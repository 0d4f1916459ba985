"""``fit`` with defaults on all posteriors of posteriordb that have reference draws."""
