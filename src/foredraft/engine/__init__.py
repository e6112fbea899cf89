"""The step loop and what it is made of."""
