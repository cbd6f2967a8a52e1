"""Mathematics of capsule regression: EM in batches and in steps, passive-aggressive learning, prediction."""
