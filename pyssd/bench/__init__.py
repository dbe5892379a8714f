"""The benchmark behind ``pyssd bench``: plain decoding against pyssd, in pairs, in one process.

prompts.py reads what to ask, runner.py takes the pairs, peers.py runs other programs on the same prompts, summary.py turns
records into figures, report.py and plot.py show them, results.py keeps them in a file that an interrupted run continues,
and synthetic.py forces the outcome of verification, to compare measured with predicted speed.
"""

from __future__ import annotations
