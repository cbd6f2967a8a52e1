"""Conditional RBMs as mathematics: energies, gradients, learning by minibatches."""
