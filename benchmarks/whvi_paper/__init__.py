"""Walsh-Hadamard variational inference (Rossi, Marmin & Filippone 2020): its figures run again."""
