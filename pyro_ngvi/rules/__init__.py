"""Pure rules: from gradients and a state to the next parameters; they know families, not guides."""
