"""One call: what was asked for, which kind of call it is, what it runs.

`request` is a statement with its options; `prepared` the kinds of calls that it was met in, found
by one guard; `stages` a statement as several, where that is better; `tuning` a call that is tuned.
"""
