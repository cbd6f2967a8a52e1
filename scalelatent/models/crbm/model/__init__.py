"""Mathematics of conditional RBMs: energies, gradients, learning from minibatches."""
