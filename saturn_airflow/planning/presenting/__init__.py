"""Plans for people: explanations, the terminal, files, and the rules to compare with."""
