"""Process values: a critic trained on the outcomes of branches."""
