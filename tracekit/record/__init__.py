"""Recording: prompts in, one model watched while it answers them, a trace out."""
