"""What a run of the leaderboard leaves in its folder, and how it is read and written.

::

    manifest.json                 protocol, environments, agents: no times, no machine
    tasks/<environment>.json      the fixed list of tasks, with a hash of each one's content
    results/<environment>/<agent>.jsonl   one line an episode, by task and sample
    seconds/<environment>/<agent>.jsonl   what varies from run to run, so it stands apart
    checksums.json                SHA-256 of all of these but seconds; made when the run is complete
    leaderboard.{md,csv,html}     made from the rest

Results hold no question, observation or gold answer: the data sets have licences of their own.
Files come from others too, so everything is checked as it is read, and a line counts only in the
very form in which it is written here.
"""
