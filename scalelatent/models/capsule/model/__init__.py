"""Mathematics of capsule regression: EM in passes and in steps, prediction."""
