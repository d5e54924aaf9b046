"""The rules by which a report judges: which level, which bound, over how many prompts.

Answers, claims, the diagnosis and the section on domains are built on these.
"""
