"""Expected curvatures that a loss leaves for its optimizer."""
