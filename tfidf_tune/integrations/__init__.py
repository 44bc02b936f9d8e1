"""The objectives and the monitor in other trainers: a module for each, which needs that trainer and
no extra.
"""
