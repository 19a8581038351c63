"""From an idea to an entry: a template, a check with five tasks, and what a pull request holds."""
