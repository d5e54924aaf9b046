"""Which tokens get a logit: candidate sets named before the head runs, and what they cover."""
