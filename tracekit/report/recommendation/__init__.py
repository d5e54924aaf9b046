"""Which policy to use: chosen on some prompts, certified on others."""
