"""Files of a run (``manifest.json``, ``tasks.json``, ``results.parquet`` and ``checksums.json``).

Results contain no question, observation or gold answer: the data sets have their own licences.
Files may come from strangers, so every value is checked while it is read, and a row counts only in
the form in which this package writes it.
"""
