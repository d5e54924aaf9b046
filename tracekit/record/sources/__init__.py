"""Sources of sequences, one a file: prompts, texts, conversations."""
