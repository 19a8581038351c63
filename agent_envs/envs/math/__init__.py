"""Problems with one right answer."""
