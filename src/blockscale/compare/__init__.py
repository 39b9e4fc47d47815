"""Does a recipe still converge, and what is gained? Paired runs of several recipes, a null run, verdicts, a page.

comparison.py   paired runs of several recipes    statistics.py   paired gaps, confidence intervals, verdicts
stored.py       run records on disk               side_by_side.py runs in worker processes
branch.py       runs that branch off a checkpoint control.py      a faulty arm that must come out as worse
answer.py       verdicts as sentences             report.py       table and HTML page; charts.py
throughput.py   step time and memory of recipes   publish.py      run folders to stored rows; pool.py
"""
