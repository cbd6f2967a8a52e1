"""Learning and using binary features of binary images."""
