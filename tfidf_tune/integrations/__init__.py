"""The objectives and the monitor in other trainers: a module for each, which imports that trainer and needs no extra."""
