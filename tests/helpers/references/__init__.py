"""Formulas once more, written from papers and contracts alone: float64, loops, no code of the
package.
"""
