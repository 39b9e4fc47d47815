"""Does a recipe still converge, and what is gained? Paired runs of several recipes, a null run, verdicts, a page.

comparison.py   paired runs of several recipes    statistics.py   paired gaps, confidence intervals, verdicts
stored.py       run records on disk               side_by_side.py runs in worker processes
report.py       table and sentences               page.py         the HTML page with its curves
rows.py         rows for a results file           throughput.py   step time and memory of recipes
control.py      a faulty arm that must come out as worse
"""
