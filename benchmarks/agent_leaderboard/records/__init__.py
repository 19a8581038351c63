"""Files of a run, and how they are read and written.

::

    manifest.json      protocol, environments, agents: no times, no machine
    tasks.json         the fixed task list of each environment, with a hash of each task's content
    results.parquet    one row per episode
    checksums.json     SHA-256 of these three; written when the run is complete

Results contain no question, observation or gold answer: the data sets have their own licences.
Files may come from strangers, so every value is checked while it is read, and a row counts only in
the form in which this package writes it.
"""
