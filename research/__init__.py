"""What only the authors of the results need: experiments, the frontier, the paper, benchmarks and
their records.
"""
