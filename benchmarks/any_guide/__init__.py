"""IFVB and AIFVB where no closed-form Fisher matrix is needed: steps, ELBO at equal time, memory."""
