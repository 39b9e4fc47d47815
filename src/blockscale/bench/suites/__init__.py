"""One file per suite: `cases` lists what is timed."""
