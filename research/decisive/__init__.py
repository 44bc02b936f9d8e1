"""The registered experiment: repetition weights against deduplication, on passages drawn anew."""
